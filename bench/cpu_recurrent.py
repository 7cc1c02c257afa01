"""Recurrent layers on the CPU: native kernels beside the NumPy bodies of their ops.

    python bench/cpu_recurrent.py [--rows 1 8] [--prefill 512] [--rounds 5] [--cpu-time]
    python bench/cpu_recurrent.py --check

Random models like Qwen3-Next and Qwen3.5 with few layers. Each is loaded twice, with
all kernels and without the native ones of the recurrent ops, and both are timed in turn
in every round: ratios of medians, of whole steps and of one layer's recurrent ops.
``--cpu-time`` counts processor time, for a machine that others share; one thread.
``--check`` compares greedy answers in float32 with those of the reference backend.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from random_models import Random

from inl import Device, EngineConfig
from inl.dtypes import wrap
from inl.executor.model_loader import LanguageModel, start_runner
from inl.models import qwen3_5, qwen3_next
from inl.ops.attention import random_step
from inl.ops.recurrent import Decay, Taps
from inl.plugin import make_backend
from inl.spec.message import Row, admit_frame, step_frame
from inl.spec.op import Spec
from inl.spec.step import Bucket
from inl.spec.tree import leaves
from inl.weights.sources import stored_tensors
from inl_cpu.native_backend import NativeBackend

Clock = Callable[[], float]
Work = Callable[[], object]
LAYERS = 6
"""Layers whose state the ops are timed on in turn."""
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

    with patch.object(NativeBackend, "kernels", without):
        yield


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
        self.runner.submit(message)
        tokens_of_rows: list[int] = self.runner.collect().tokens.ravel().tolist()
        return tokens_of_rows

    def prompt(self, count: int) -> list[int]:
        self.admit()
        rng = np.random.default_rng(count)
        ids = rng.integers(0, COMMON["vocab_size"], (self.rows, count)).tolist()
        return self.step(ids, decoding=False)

    def decode(self) -> list[int]:
        return self.step([[-1]] * self.rows, decoding=True)


class Times:
    """Pairs of times of the same work by two kernels, one after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pairs: dict[str, list[tuple[float, ...]]] = {}

    def pair(self, key: str, works: Sequence[Work], *, warm: bool = True) -> None:
        """Time each work in turn; only warm times are kept."""
        spent = []
        for work in works:
            start = self._clock()
            work()
            spent.append(self._clock() - start)
        if warm:
            self._pairs.setdefault(key, []).append(tuple(spent))

    def show(self, name: str) -> None:
        for key, pairs in self._pairs.items():
            fast, slow = map(statistics.median, zip(*pairs, strict=True))
            print(
                f"{name}: {key}: native {1e3 * fast:.2f} ms, "
                f"NumPy {1e3 * slow:.2f} ms, ratio {slow / fast:.1f}"
            )


def measure(name: str, given: argparse.Namespace, times: Times) -> None:
    language = random_hybrid(name)
    for rows in given.rows:
        native = Rows(language, "cpu", "bfloat16", rows)
        with numpy_bodies():
            both = native, Rows(language, "cpu", "bfloat16", rows)
        for number in range(given.rounds + 1):
            if rows == 1:
                prompts = [partial(each.prompt, given.prefill) for each in both]
                times.pair(f"step, prompt of {given.prefill}", prompts, warm=number > 0)
            for each in both:
                each.prompt(16)
            for step in range(given.steps):
                warm = number > 0 and step > 0
                works = [each.decode for each in both]
                times.pair(f"step, {rows} rows", works, warm=warm)
        for each in both:
            each.runner.close()


def measure_ops(name: str, given: argparse.Namespace, times: Times) -> None:
    """One layer's recurrent ops in float32, on state that is in no cache."""
    model, hf = SHAPES[name]
    c = model.config(hf)
    kernels = {(k.op, k.name): k for k in NativeBackend(Device("cpu")).kernels()}
    rng = np.random.default_rng(2)

    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    for rows, count in [*((rows, 1) for rows in given.rows), (1, given.prefill)]:
        step, _ = random_step(rng, [3] * rows, [count] * rows)
        step = step._replace(slots=np.arange(1, rows + 1, dtype=np.int32))
        tokens, weight = rows * count, wrap(floats(c.channels, 1, c.taps))
        vectors = (
            *floats(2, tokens, c.key_heads, c.key_dim),
            floats(tokens, c.value_heads, c.value_dim),
            *floats(2, tokens, c.value_heads),
        )
        decay = Decay(*floats(2, c.value_heads))
        x = floats(tokens, c.channels)
        matrices = floats(LAYERS, rows + 1, c.value_heads, c.key_dim, c.value_dim)
        inputs = floats(LAYERS, rows + 1, c.taps - 1, c.channels)
        for number in range(LAYERS * (given.rounds + 1)):
            for op in ("causal_conv", "delta_rule"):
                works: list[Work] = []
                for kernel in (kernels[op, "native"], kernels[op, "numpy"]):
                    if op == "delta_rule":
                        args = *vectors, matrices[number % LAYERS], step, decay
                    else:
                        w = Taps(weight.data)
                        if kernel.pack is not None:
                            w = kernel.pack({"weight": weight}, None, "float32")
                        args = x, inputs[number % LAYERS], step, w
                    attrs = {"tiled": False} if op == "delta_rule" else {}
                    works.append(partial(kernel.run, *args, **attrs))
                key = f"{op}, {rows} x {count} tokens"
                times.pair(key, works, warm=number >= LAYERS)


def check(name: str, steps: int) -> None:
    """Compare answers to three prompts with those of the reference backend."""
    language = random_hybrid(name)
    texts = []
    for device in ("cpu", "reference"):
        rows = Rows(language, device, "float32", 3)
        texts.append([rows.prompt(50), *(rows.decode() for _ in range(steps))])
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
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.cpu_time:
        os.environ["INL_THREADS"] = "1"
    for name in SHAPES:
        if given.check:
            check(name, given.steps)
            continue
        times = Times(time.process_time if given.cpu_time else time.perf_counter)
        measure_ops(name, given, times)
        measure(name, given, times)
        times.show(name)


if __name__ == "__main__":
    main()
