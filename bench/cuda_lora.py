"""Decoding with several adapters in a batch, on one NVIDIA GPU.

    python bench/cuda_lora.py
    python bench/cuda_lora.py --models smollm2 --rows 32 --profile

Two engines of default settings with the same random weights, one without room for
adapters and one with random adapters of every linear layer. Times of a decoding step of
the first, of the second without adapters in the batch, and of the second with its rows
shared among all adapters; runs of the three alternate. Each figure is the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from cuda_engines import random_prompts
from random_models import random_language
from torch.profiler import ProfilerActivity, profile

from inl.backend.base import Backend
from inl.config import EngineConfig
from inl.device import Device
from inl.engine.core import EngineCore
from inl.executor.model_loader import LanguageModel
from inl.ops.lora import Lora
from inl.runners.local_runner import start_runner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.tree import leaves

CONTEXT, PROMPT = 2048, 128
STEPS = 50
"""Timed steps of a run."""


def loras(tree: Any) -> Iterator[Lora]:
    """Yield the stacked matrices of all adapters of a tree of weights."""
    if isinstance(tree, Lora):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from loras(item)


class Engine:
    """An engine core with room for ``adapters``, whose matrices are random."""

    def __init__(
        self, backend: Backend, language: LanguageModel, adapters: int, rank: int
    ) -> None:
        config = language.config
        per_token = 4 * config.layers * config.kv_heads * config.head_dim
        settings = EngineConfig(
            backend=str(backend.device), context=CONTEXT, prefix_cache=False,
            check_weights=False, cache_bytes=64 * CONTEXT * per_token,
            max_adapters=adapters or None, max_adapter_rank=rank,
        )  # fmt: skip
        runner = start_runner(language, backend, settings)
        matrices = list(loras(runner.executor.loaded.weights)) if adapters else []
        for lora in matrices:
            lora.a.normal_(std=lora.a.shape[1] ** -0.5)
            lora.b.normal_(std=0.01)
        policy = SchedulerConfig(
            token_budget=runner.limits.token_budget, context=CONTEXT, prefix_cache=False
        )
        self.runner, self.core = runner, EngineCore(runner, policy)
        self.core.scheduler.adapters = {n: str(n) for n in range(1, adapters + 1)}
        self.rng = np.random.default_rng(0)
        self.nbytes = sum(leaf.nbytes for leaf in leaves(tuple(matrices)))

    def decode(self, rows: int, adapters: int, steps: int = STEPS) -> float:
        """Milliseconds per decoding step, rows shared among the first adapters."""
        self.fill(rows, adapters, steps + 20)
        for _ in range(5):
            self.core.step()
        start = time.perf_counter()
        for _ in range(steps):
            self.core.step()
        seconds = time.perf_counter() - start
        while self.core.has_work:
            self.core.step()
        return 1e3 * seconds / steps

    def fill(self, rows: int, adapters: int, tokens: int) -> None:
        """Add requests and compute their prompts."""
        vocab = self.runner.limits.vocab
        for row, prompt in enumerate(random_prompts(self.rng, rows, PROMPT, vocab)):
            number = row % adapters + 1 if adapters else 0
            chosen = {"adapter": number, "adapter_digest": str(number)}
            request = Request(
                prompt, max_tokens=tokens, ignore_eos=True, **chosen if number else {}
            )
            self.core.add(request)
        scheduler = self.core.scheduler
        while scheduler.waiting or any(
            request.scheduled < request.prefill_len
            for request in scheduler.running.values()
        ):
            self.core.step()

    def spent(self, rows: int, adapters: int, steps: int = 20) -> None:
        """Print the launches of a step and the mean time of each kernel."""
        self.fill(rows, adapters, steps + 20)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(steps):
                self.core.step()
            torch.cuda.synchronize()
        while self.core.has_work:
            self.core.step()
        events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
        events.sort(key=lambda e: -e.self_device_time_total)
        count = sum(e.count for e in events) / steps
        print(f"  {count:.1f} launches a step")
        for e in events[:12]:
            mean = e.self_device_time_total / e.count
            print(f"    {e.count / steps:6.1f} x {mean:8.2f} us  {e.key[:70]}")


def compare(backend: Backend, language: LanguageModel, given: Any) -> None:
    """Print the times of all engines for each number of rows."""
    plain = Engine(backend, language, 0, given.rank)
    adapted = Engine(backend, language, given.adapters, given.rank)
    print(f"adapters: {given.adapters} of rank {given.rank}, {adapted.nbytes:,} bytes")
    ways = (
        ("no room for adapters", plain, 0),
        ("none in the batch", adapted, 0),
        (f"{given.adapters} in the batch", adapted, given.adapters),
    )
    for rows in given.rows:
        for _, engine, count in ways:
            engine.decode(rows, count, 5)  # captures the programs
        runs = [
            [engine.decode(rows, count) for _, engine, count in ways]
            for _ in range(given.runs)
        ]
        medians = [statistics.median(times) for times in zip(*runs, strict=True)]
        for (name, engine, count), ms in zip(ways, medians, strict=True):
            print(f"{rows:4} rows, {name:22} {ms:7.3f} ms, {ms / medians[0]:.3f} x",
                  flush=True)  # fmt: skip
            if given.profile:
                engine.spent(rows, count)
    plain.runner.close()
    adapted.runner.close()


def main() -> int:
    """Print all times."""
    from inl_cuda.backend import CudaBackend

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["8b", "smollm2"])
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    backend = CudaBackend(Device("cuda:0"))
    for name in given.models:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {name}")
        compare(backend, random_language(name, layers=given.layers), given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
