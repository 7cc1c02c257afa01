"""Decoding a mixture of experts on the CPU, beside the time that its bytes allow.

    python bench/cpu_mixture.py [--layers 28] [--experts 16] [--chosen 4] [--steps 60]

The model has the width of Qwen2.5 1.5B and random Q4_K experts, of which the random
router of each layer chooses other ones for each token. Active bytes are those of the
attention, the head and the chosen experts, as packed; the time that they allow is
the time in which all threads read as many bytes of other memory, measured before
each step. A ratio of 1 is that time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from cpu_steps import Steps
from random_models import Random

from inl.checkpoints.blocks.dtypes import BLOCKS
from inl.dtypes import HostArray
from inl.engine.benchmark import traffic
from inl.executor.model_loader import LanguageModel
from inl.models.qwen3_moe import MODEL
from inl.spec.op import Spec
from inl.spec.tree import leaves
from inl_cpu.instructions import Read

WIDTH = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""The shape of Qwen2.5 1.5B, without its layers."""
KIND = "q4_k"


class Blocks(Random):
    """Random tensors: matrices in blocks of one kind, vectors of ones."""

    def tensor(self, name: str) -> HostArray:
        dtype, shape = self.spec(name)
        if dtype != KIND:
            return super().tensor(name)
        if shape not in self._made:
            columns, size = BLOCKS[KIND]
            rng = np.random.default_rng(len(self._made))
            blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // columns, size))
            data = blocks.astype(np.uint8)
            scales = np.array([1e-4, 8e-4], np.float16).view(np.uint8)
            data[..., :4] = scales
            self._made[shape] = HostArray(data.reshape(*shape[:-1], -1), KIND, shape)
        return self._made[shape]


def mixture(layers: int, experts: int, chosen: int, size: int) -> LanguageModel:
    """Return a random mixture; size: inner size of one expert."""
    hf: dict[str, Any] = WIDTH | {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
    }
    config = replace(MODEL.config(hf), dtype="bfloat16")
    specs = {}
    for group in leaves(MODEL.weights(config)):
        for param in group.params.values():
            names = [param.source.format(n) for n in range(param.stack)]
            shape = param.shape[1:] if names else param.shape
            dtype = KIND if len(shape) == 2 else "bfloat16"
            for name in names or [param.source]:
                specs[name] = Spec(shape, dtype)
    return LanguageModel(MODEL, config, Blocks(hf, specs))


def active_bytes(runner: Any, share: float) -> int:
    """Bytes of weights that one token reads; share: chosen of all experts."""
    stored = traffic(runner).weights
    packed = sum(
        matrix.data.nbytes
        for layer in runner.loaded.weights.layers
        for matrix in (*layer.mlp.experts.gate_up, layer.mlp.experts.down)
    )
    return int(stored - (1 - share) * packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (
        ("layers", 28), ("experts", 16), ("chosen", 4), ("size", 1280),
        ("steps", 60),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    language = mixture(given.layers, given.experts, given.chosen, given.size)
    options = SimpleNamespace(dtype="bfloat16", prefill=[], kv_dtype="auto")
    steps = Steps(language, options, rows=1, context=1024)
    size = active_bytes(steps.runner, given.chosen / given.experts) // 64 * 64
    megabytes = f"{size / 1e6:.0f} MB a token"
    print(f"{given.experts} experts, {given.chosen} chosen; {megabytes}")
    memory, checksum = np.ones(size, np.uint8), np.zeros(1, np.uint64)
    probe = Read(bytes=size, x=memory, y=checksum)
    rng = np.random.default_rng(1)
    steps.admit(0)
    steps.run([17])
    steps.admit(100)
    pairs = []
    for token in rng.integers(0, 100000, given.steps):
        reading = seconds(lambda: steps.backend.emitter.emit(probe))
        step = seconds(lambda token=token: steps.run([int(token)]))
        pairs.append((step, reading))
    steps_taken, readings = zip(*pairs, strict=True)
    ratios = [step / reading for step, reading in pairs]
    print(
        f"step {statistics.median(steps_taken) * 1e3:.1f} ms, reading as many bytes "
        f"{statistics.median(readings) * 1e3:.1f} ms "
        f"({size / statistics.median(readings) / 1e9:.1f} GB/s); ratio "
        f"{statistics.median(ratios):.2f}, quartiles "
        + " to ".join(f"{each:.2f}" for each in np.quantile(ratios, (0.25, 0.75)))
    )


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
