"""Throughput, time to first token and GPU utilization on an NVIDIA GPU.

    python bench/cuda_serve.py --model 8b --requests 8 32 512 --ttft 8000 --profile
    python bench/cuda_serve.py MODEL.gguf --requests 8 32 512 --ready
    python bench/cuda_serve.py MODEL.gguf --requests 512 --pairs 9

A shape has random weights and uses the engine core, with token ids as input and events
as output; a file uses the whole engine, with text. Prompts are distinct random tokens.
``--pairs`` compares the whole engine of a file with its core, one after the other;
with ``--stop``, also with stop strings.
``--check`` first compares two layers of the shape with a plain torch model. Copies and
matrix products are measured in the same run, as ceilings.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from cuda_check import check
from cuda_engines import Serving, load, random_prompts, weight_bytes
from cuda_steps import copy_rate
from random_models import SHAPES
from torch.profiler import ProfilerActivity, profile

from inl.device import Device
from inl.scheduling.request import Request
from inl_cuda.backend import CudaBackend

TARGETS = {
    ("8b", 8): 1_600, ("8b", 32): 4_100, ("8b", 512): 7_600, ("8b", "first"): 190,
    ("smollm2", 8): 14_000, ("smollm2", 32): 40_000, ("smollm2", 512): 120_000,
    ("smollm2", "first"): 9,
}  # fmt: skip
"""Output tokens per second, and milliseconds to the first token after 8,000."""

READY = """
import sys
from inl import EngineConfig, InferenceEngine
config = EngineConfig(backend="cuda:0", max_batch=8, sampling="greedy", context=512)
with InferenceEngine.from_pretrained(sys.argv[1], config=config) as engine:
    engine.generate([1, 2, 3, 4], max_tokens=2)
"""


def products_rate() -> float:
    """Operations per second of a large bfloat16 product of random numbers."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates = []
    for _ in range(20):
        begin.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        rates.append(2e3 * 8192**3 / begin.elapsed_time(end))
    return statistics.median(rates)


Span = tuple[int, int, str]
"""Start and end of a kernel in nanoseconds, and its name."""


def watched(core: Any, steps: int) -> list[Span]:
    """Kernels of the given number of steps, or of all that remain, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            if core.has_work:
                core.step()
        torch.cuda.synchronize()
    return sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in seen.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    )


def share_busy(found: list[Span]) -> float:
    """Busy share of the time from the first kernel to the end of the last."""
    first = reached = found[0][0]
    union = 0
    for begin, end, _ in found:
        union += max(end, reached) - max(begin, reached)
        reached = max(end, reached)
    return union / (reached - first)


def listed(found: list[Span], steps: int, most: int = 14) -> None:
    """Print the slowest kernels."""
    totals: dict[str, list[int]] = {}
    for begin, end, name in found:
        totals.setdefault(name, []).append(end - begin)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))
    for name, spans in ranked[:most]:
        print(f"    {sum(spans) / 1e3 / steps:9.1f} us a step, "
              f"{len(spans) / steps:6.1f} x {statistics.median(spans) / 1e3:8.2f}  "
              f"{name[:90]}")  # fmt: skip


def reading(core: Any) -> bool:
    """Whether a prompt is still being prefilled."""
    return core.scheduler.waiting or any(
        request.scheduled < request.prefill_len
        for request in core.scheduler.running.values()
    )


def emptied(core: Any) -> None:
    """Cancel all requests."""
    for number in list(core.scheduler.live):
        core.cancel(number)
    while core.has_work:
        core.step()


def ask(core: Any, prompts: list[list[int]], tokens: int) -> None:
    """Queue prompts with outputs of the given length."""
    for prompt in prompts:
        core.add(Request(prompt, max_tokens=tokens, ignore_eos=True))


def filling(serving: Serving, prompts: list[list[int]]) -> None:
    """Print where the time goes during prefill: wall clock, then profile."""
    core, steps = serving.core, 0
    start = time.perf_counter()
    ask(core, prompts, 100)
    added = time.perf_counter()
    while reading(core):
        core.step()
        steps += 1
    torch.cuda.synchronize()
    end = time.perf_counter()
    each = 1e3 * (end - added) / steps
    print(f"  {len(prompts)} prompts in {1e3 * (end - start):.1f} ms: "
          f"{1e3 * (added - start):.1f} ms to ask, then {each:.2f} ms for each of "
          f"{steps} steps")  # fmt: skip
    emptied(core)
    ask(core, prompts, 100)
    watched(core, 2)  # the profiler's own start
    found = watched(core, 6)
    print(f"    profiled, the GPU is busy {share_busy(found):.1%} of 6 steps, "
          f"{(found[-1][1] - found[0][0]) / 6e6:.2f} ms each")  # fmt: skip
    listed(found, 6)
    emptied(core)


def busy(serving: Serving, prompts: list[list[int]], steps: int = 100) -> None:
    """Print the GPU utilization of decoding steps."""
    core = serving.core
    ask(core, prompts, 3 * steps)
    while reading(core):
        core.step()
    for _ in range(5):
        core.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    ms = 1e3 * (time.perf_counter() - start) / steps
    torch.cuda.synchronize()
    found = watched(core, steps + steps // 3)
    # The first steps of a profile wait for the profiler.
    found = found[len(found) // 4 :]
    print(f"  {len(prompts)} rows decode: {ms:.3f} ms a step, "
          f"{1e3 * len(prompts) / ms:,.0f} tokens/s; profiled, the GPU is busy "
          f"{share_busy(found):.1%} of "
          f"{(found[-1][1] - found[0][0]) / 1e6 / steps:.3f} ms "
          f"a step, {len(found) / steps:.0f} launches")  # fmt: skip
    listed(found, steps)
    emptied(core)


def spent(serving: Serving, prompt: list[int]) -> None:
    """Print the kernels of one prompt's steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        serving.answer([prompt], 1)
        torch.cuda.synchronize()
    events = [e for e in seen.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    whole = sum(e.self_device_time_total for e in events)
    print(f"  first token: {whole / 1e3:.2f} ms in kernels")
    for e in events[:12]:
        print(f"    {e.self_device_time_total / 1e3:8.3f} ms, {e.count:4} x "
              f"{e.self_device_time_total / e.count:9.1f} us  "
              f"{e.key[:90]}")  # fmt: skip


def compared(
    serving: Serving, draw: Callable[[], Any], tokens: int, n: int, stop: list[str]
) -> None:
    """Print what text takes: ``n`` pairs of the core and the whole engine.

    draw: makes the prompts of a pair. stop: stop strings of the whole engine.
    """
    seconds: list[tuple[float, float]] = []
    for number in range(n):
        prompts = draw()
        # Each comes first as often as the other.
        if number % 2:
            text = serving.answer(prompts, tokens, stop)
            seconds.append((serving.answer_ids(prompts, tokens), text))
        else:
            core = serving.answer_ids(prompts, tokens)
            seconds.append((core, serving.answer(prompts, tokens, stop)))
    ratios = [core / text for core, text in seconds]
    core, text = (1e3 * statistics.median(each) for each in zip(*seconds, strict=True))
    named = f"text and {len(stop)} stop strings" if stop else "text"
    print(f"  {n} pairs: core {core:.1f} ms, with {named} {text:.1f} ms; throughput "
          f"with text / core: {statistics.median(ratios):.3f} "
          f"({min(ratios):.3f} to {max(ratios):.3f})", flush=True)  # fmt: skip


def ready(path: str) -> None:
    """Print the time from a process's start to its first answer."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold caches", "warm", "warm"):
            env = {**os.environ, "TRITON_CACHE_DIR": folder, "TRITON_HOME": folder}
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", READY, path], env=env, check=True, timeout=200
            )
            print(f"  ready, {kind}: {time.perf_counter() - start:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?")
    parser.add_argument("--model", default="smollm2", choices=SHAPES)
    parser.add_argument("--requests", type=int, nargs="*", default=[8, 32, 512])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ttft", type=int, default=0, help="tokens of its prompt")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=0, help="core and text, a file's")
    parser.add_argument("--stop", nargs="*", default=[], help="strings, for --pairs")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--ready", action="store_true")
    given = parser.parse_args()
    if given.ready and given.path:
        ready(given.path)
    backend, rng = CudaBackend(Device("cuda:0")), np.random.default_rng(0)
    copies, products = copy_rate(), products_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"{given.path or given.model}; ceilings: copies {copies / 1e12:.2f} TB/s, "
          f"products {products / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip
    right = not given.check or check(backend, given.model)
    start = time.perf_counter()
    loaded = None if given.path else load(backend, given.model)[0]
    if loaded is not None:
        size = weight_bytes(loaded.weights) / 1e9
        print(f"weights {size:.2f} GB in {time.perf_counter() - start:.1f} s")

    def serving(rows: int, context: int) -> Serving:
        if loaded is None:
            return Serving.file(backend, given.path, rows, context, given.budget)
        return Serving.shape(backend, loaded, rows, context, given.budget)

    def against(key: Any, value: float) -> str:
        target = TARGETS.get(("smollm2" if given.path else given.model, key))
        return f"target {target:,}: {value / target:.2f} of it" if target else ""

    if given.ttft:
        server = serving(8, given.ttft + 64)
        vocab = server.runner.limits.vocab
        server.answer(random_prompts(rng, 1, given.ttft, vocab), 1)
        server.settle()
        times: dict[str, list[float]] = {"back to back": [], "after a rest": []}
        for way, found in times.items():
            for _ in range(7):
                # A chip that was busy before is warm, and runs slower.
                time.sleep(1 if way == "after a rest" else 0)
                prompt = random_prompts(rng, 1, given.ttft, vocab)
                found.append(1e3 * server.answer(prompt, 1))
            ms = statistics.median(found)
            print(f"first token of {given.ttft}, {way}: {ms:.2f} ms "
                  f"({min(found):.2f} to {max(found):.2f}) "
                  f"{against('first', ms)}", flush=True)  # fmt: skip
        if given.profile:
            spent(server, random_prompts(rng, 1, given.ttft, vocab)[0])
        server.close()
    for rows in given.requests:
        torch.cuda.reset_peak_memory_stats()
        server = serving(rows, given.prompt + given.tokens + 128)
        vocab = server.runner.limits.vocab
        start = time.perf_counter()
        server.runner.warm_up()
        warm = time.perf_counter() - start
        server.settle()
        server.answer(random_prompts(rng, rows, given.prompt, vocab), 4)
        rates = [
            rows * given.tokens / server.answer(
                random_prompts(rng, rows, given.prompt, vocab), given.tokens
            )
            for _ in range(given.runs)
        ]  # fmt: skip
        rate = statistics.median(rates)
        used = torch.cuda.max_memory_allocated() / 1e9
        print(f"{rows:4} requests of {given.prompt} + {given.tokens}: {rate:,.0f} out "
              f"tokens/s ({min(rates):,.0f} to {max(rates):,.0f}) "
              f"{against(rows, rate)}; "
              f"{len(server.runner.limits.buckets)} programs in {warm:.1f} s, peak "
              f"{used:.1f} GB", flush=True)  # fmt: skip
        if given.pairs and server.engine is not None:
            draw = partial(random_prompts, rng, rows, given.prompt, vocab)
            for stop in [[], given.stop] if given.stop else [[]]:
                compared(server, draw, given.tokens, given.pairs, stop)
        if given.profile and server.engine is None:
            filling(server, random_prompts(rng, rows, given.prompt, vocab))
            busy(server, random_prompts(rng, rows, given.prompt - 100, vocab))
        server.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
