"""Recurrent layers on the CPU: native kernels beside the NumPy bodies of their ops.

    python bench/cpu_recurrent.py [--rows 1 8] [--prefill 512] [--rounds 5] [--check]

Random models like Qwen3-Next and Qwen3.5 with few layers. Each is loaded twice, with
all kernels and without the native ones of the recurrent ops, and both are timed in turn
in every round: ratios of medians. ``--check`` compares greedy answers in float32 with
those of the reference backend instead of taking times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from random_models import Random

from inl import Device, EngineConfig
from inl.executor.model_loader import LanguageModel, start_runner
from inl.models import qwen3_5, qwen3_next
from inl.plugin import make_backend
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.op import Spec
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.weights.sources import stored_tensors
from inl_cpu.native_backend import NativeBackend

OPS = ("causal_conv", "delta_rule", "activate")
COMMON = {
    "vocab_size": 16384, "hidden_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 8192,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True, "partial_rotary_factor": 0.25,
}  # fmt: skip
SHAPES = {
    "qwen3.5": (qwen3_5.MODEL, COMMON | {
        "intermediate_size": 3584, "num_hidden_layers": 8,
        "linear_num_value_heads": 16,
    }),
    "qwen3-next": (qwen3_next.MODEL, COMMON | {
        "intermediate_size": 2048, "num_hidden_layers": 4,
        "linear_num_value_heads": 32, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }),
}  # fmt: skip
"""The first has the layers of Qwen3.5 0.8B."""


def random_hybrid(name: str) -> LanguageModel:
    model, hf = SHAPES[name]
    config = replace(model.config(hf), dtype="bfloat16")
    specs = {
        source: Spec(shape, "bfloat16")
        for group in leaves(model.weights(config))
        for param in group.params.values()
        for source, shape in stored_tensors(param).items()
    }
    return LanguageModel(model, config, Random(hf, specs))


@contextmanager
def numpy_bodies() -> Iterator[None]:
    """Leave out the native kernels of the recurrent ops."""
    native = NativeBackend.kernels

    def without(backend: Any) -> Any:
        for kernel in native(backend):
            if kernel.op not in OPS or kernel.name == "numpy":
                yield kernel

    NativeBackend.kernels = without  # type: ignore[method-assign]
    try:
        yield
    finally:
        NativeBackend.kernels = native  # type: ignore[method-assign]


class Rows:
    """A runner whose rows all get a prompt, then one token a step."""

    def __init__(self, language: LanguageModel, device: str, dtype: str, rows: int):
        options = EngineConfig(
            backend=device, dtype=dtype, max_batch=rows, context=2048,
            sampling="greedy", token_budget=2048,
        )  # fmt: skip
        backend = make_backend(Device(device))
        self.runner = start_runner(language, backend, options)
        self.rows = rows

    def admit(self) -> None:
        limits = self.runner.limits
        size = limits.max_blocks_per_seq
        for row in range(self.rows):
            table = [list(range(1 + row * size, 1 + (row + 1) * size))] * limits.groups
            self.runner.submit(
                admit_frame(
                    1 + row, table, groups=limits.groups, max_blocks_per_seq=size
                )
            )

    def step(
        self, tokens: list[list[int]], *, decoding: bool
    ) -> tuple[list[int], float]:
        """Tokens of each row, and seconds."""
        limits = self.runner.limits
        message = step_frame(
            Bucket(sum(map(len, tokens)), self.rows),
            [Row(1 + row, ids) for row, ids in enumerate(tokens)], step=0,
            groups=limits.groups, block_size=limits.block_size,
            decode_rows=self.rows if decoding else 0,
        )  # fmt: skip
        start = time.perf_counter()
        self.runner.submit(message)
        found = self.runner.collect().tokens.ravel().tolist()
        return found, time.perf_counter() - start

    def prompt(self, count: int) -> tuple[list[int], float]:
        self.admit()
        rng = np.random.default_rng(count)
        ids = rng.integers(0, COMMON["vocab_size"], (self.rows, count)).tolist()
        return self.step(ids, decoding=False)

    def decode(self) -> tuple[list[int], float]:
        return self.step([[-1]] * self.rows, decoding=True)


def measure(name: str, given: argparse.Namespace) -> None:
    language = random_hybrid(name)
    for rows in given.rows:
        native = Rows(language, "cpu", "bfloat16", rows)
        with numpy_bodies():
            bodies = Rows(language, "cpu", "bfloat16", rows)
        both = native, bodies
        times: dict[str, tuple[list[float], list[float]]] = {}
        for number in range(given.rounds + 1):
            for which, each in enumerate(both):
                if rows == 1:
                    key = f"prefill of {given.prefill}"
                    spent = each.prompt(given.prefill)[1]
                    if number:
                        times.setdefault(key, ([], []))[which].append(spent)
                each.prompt(16)
            for step in range(given.steps):
                for which, each in enumerate(both):
                    spent = each.decode()[1]
                    if number and step:
                        key = f"decoding, {rows} rows"
                        times.setdefault(key, ([], []))[which].append(spent)
        for key, (fast, slow) in times.items():
            a, b = statistics.median(fast), statistics.median(slow)
            print(
                f"{name}: {key}: native {1e3 * a:.2f} ms, NumPy {1e3 * b:.2f} ms, "
                f"ratio {b / a:.1f}",
                flush=True,
            )
        for each in both:
            each.runner.close()


def check(name: str, steps: int) -> None:
    """Compare answers to three prompts with those of the reference backend."""
    language = random_hybrid(name)
    texts = []
    for device in ("cpu", "reference"):
        rows = Rows(language, device, "float32", 3)
        first, _ = rows.prompt(50)
        texts.append([first, *(rows.decode()[0] for _ in range(steps))])
        rows.runner.close()
    same = sum(a == b for a, b in zip(*texts, strict=True))
    distinct = len({token for row in texts[0] for token in row})
    print(f"{name}: {same} of {steps + 1} steps equal, {distinct} different tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    for name in SHAPES:
        if given.check:
            check(name, given.steps)
        else:
            measure(name, given)


if __name__ == "__main__":
    main()
