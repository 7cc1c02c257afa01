"""Loads of a server on one engine with default settings, on an NVIDIA GPU.

    python bench/cuda_traffic.py --model 8b
    python bench/cuda_traffic.py --model 8b --loads first mixed --runs 3

The engine has 512 sequences, a context of 40,000 tokens and every sampler. All of its
programs are captured before the first load. Weights and prompts are random; requests
are those of the engine core, token ids in and events out. Each figure is the median of
``--runs``; copies and matrix products are measured in the same run, as ceilings.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from cuda_engines import load, random_prompts
from cuda_serve import products_rate
from cuda_steps import copy_rate
from random_models import SHAPES, Random

from inl.config import EngineConfig
from inl.device import Device
from inl.engine.core import EngineCore
from inl.executor.cache_sizing import plan_limits
from inl.runners.local_runner import LocalRunner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.weights.quantize.report import KINDS
from inl_cuda.backend import CudaBackend
from inl_torch.triton.int4 import products

SAMPLED = {"temperature": 0.8}
FILTERED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


class Traffic:
    """One engine, and the random numbers of its prompts."""

    def __init__(self, core: EngineCore, vocab: int) -> None:
        self.core, self.vocab = core, vocab
        self.rng = np.random.default_rng(0)
        self.rates: list[float] = []

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return random_prompts(self.rng, count, length, self.vocab)

    def requests(
        self, prompts: list[list[int]], tokens: Any, **options: Any
    ) -> list[Request]:
        counts = np.broadcast_to(tokens, len(prompts)).tolist()
        return [
            Request(prompt, max_tokens=count, ignore_eos=True, **options)
            for prompt, count in zip(prompts, counts, strict=True)
        ]

    def serve(
        self, requests: list[Request], arrivals: Any = None, gaps: Any = None
    ) -> tuple[float, list[float]]:
        """Return the seconds until all have finished, and those to each first token.

        arrivals: seconds after the start; all at once by default. gaps: a list to which
        the seconds between two tokens of a request are added.
        """
        torch.cuda.synchronize()
        start = time.perf_counter()
        times = np.zeros(len(requests)) if arrivals is None else np.sort(arrivals)
        waiting = list(zip(times.tolist(), requests, strict=True))[::-1]
        came, first, last, got = {}, {}, {}, 0
        while waiting or self.core.has_work:
            now = time.perf_counter() - start
            while waiting and waiting[-1][0] <= now:
                at, request = waiting.pop()
                self.core.add(request)
                came[request.id] = at
            for event in self.core.step() if self.core.has_work else ():
                if event.error is not None:
                    raise event.error
                got += event.token is not None
                if event.request not in first:
                    now = time.perf_counter() - start
                    first[event.request] = now - came[event.request]
                if gaps is not None:
                    now = time.perf_counter() - start
                    if event.request in last:
                        gaps.append(now - last[event.request])
                    last[event.request] = now
        seconds = time.perf_counter() - start
        assert got == sum(request.max_tokens for request in requests)
        return seconds, sorted(first.values())

    def rate(self, make: Callable[[], list[Request]], runs: int) -> str:
        """Output tokens per second of requests that arrive at once."""
        rates = []
        for _ in range(runs):
            requests = make()
            tokens = sum(request.max_tokens for request in requests)
            rates.append(tokens / self.serve(requests)[0])
        return f"{statistics.median(rates):,.0f} tokens/s {spread(rates)}"


def spread(found: list[float]) -> str:
    return f"({min(found):,.1f} to {max(found):,.1f})"


def decode(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    core = traffic.core
    for rows in (1, 2, 8, 16, 32, 33, 65, 128, 256, 400, 512):
        for request in traffic.requests(traffic.prompts(rows, 128), 60 * (runs + 1)):
            core.add(request)
        while core.scheduler.waiting or any(
            request.scheduled < request.prefill_len
            for request in core.scheduler.running.values()
        ):
            core.step()
        found = []
        for _ in range(runs):
            for _ in range(5):
                core.step()
            start = time.perf_counter()
            for _ in range(50):
                core.step()
            found.append(20 * (time.perf_counter() - start))
        while core.has_work:
            core.step()
        ms = statistics.median(found)
        yield f"{rows} rows decode", f"{ms:.2f} ms, {1e3 * rows / ms:,.0f} tokens/s"


def host(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    """Where the host's time of a step of one row goes."""
    core = traffic.core
    for request in traffic.requests(traffic.prompts(1, 128), 300 * (runs + 1)):
        core.add(request)
    for _ in range(50):
        core.step()
    walls, own, waits = [], [], []
    for _ in range(runs):
        torch.cuda.synchronize()
        wall, used = time.perf_counter(), time.thread_time()
        for _ in range(100):
            core.step()
        walls.append(10 * (time.perf_counter() - wall))
        own.append(10 * (time.thread_time() - used))
    yield (
        "1 row, wall and this thread",
        (f"{statistics.median(walls):.3f}, {statistics.median(own):.3f} ms"),
    )
    for _ in range(runs):
        # Each step is waited for, so that the host is idle while the device computes.
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            core.step()
            end.record()
            end.synchronize()
            waits.append(begin.elapsed_time(end))
    yield "1 row, each step waited for", f"{statistics.median(waits):.3f} ms"
    profiled = cProfile.Profile()
    profiled.runcall(lambda: [core.step() for _ in range(100)])
    while core.has_work:
        core.step()
    pstats.Stats(profiled).sort_stats("tottime").print_stats(25)


def first(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    for length in (32, 512, 8_000, 32_000):
        found = []
        for _ in range(runs + 1):
            requests = traffic.requests(traffic.prompts(1, length), 1)
            found.append(1e3 * traffic.serve(requests)[0])
        ms = statistics.median(found[1:])
        yield f"first token of {length:,}", f"{ms:.1f} ms {spread(found[1:])}"


def turns(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    """A later turn of a chat: new tokens after a prefix that is cached."""
    for length, new in ((2_000, 30), (8_000, 30), (32_000, 30), (32_000, 500)):
        (prefix,) = traffic.prompts(1, length)
        traffic.serve(traffic.requests([prefix], 1))
        found = []
        for _ in range(2 * runs + 1):
            prompts = [[*prefix, *traffic.prompts(1, new)[0]]]
            found.append(1e3 * traffic.serve(traffic.requests(prompts, 1))[0])
        ms = statistics.median(found[1:])
        yield f"{new} after {length:,} cached", f"{ms:.1f} ms {spread(found[1:])}"


def batches(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    for count in (8, 32, 512):
        yield (
            f"{count} requests of 512 + 128",
            traffic.rate(
                lambda count=count: traffic.requests(traffic.prompts(count, 512), 128),
                runs,
            ),
        )


def long(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    yield (
        "4 requests of 32,000 + 256",
        traffic.rate(lambda: traffic.requests(traffic.prompts(4, 32_000), 256), runs),
    )


def mixed(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    # The same lengths in all runs, which then differ by their noise alone.
    rng = np.random.default_rng(1)
    lengths, tokens = (
        np.exp(rng.uniform(np.log(16), np.log(most), 128)).astype(int)
        for most in (4_000, 512)
    )

    def make(**options: Any) -> list[Request]:
        prompts = [traffic.prompts(1, length)[0] for length in lengths]
        return traffic.requests(prompts, tokens, **options)

    def each() -> list[Request]:
        kinds = [make(), make(**SAMPLED), make(**FILTERED)]
        return [kinds[index % 3][index] for index in range(128)]

    name = "128 requests of mixed lengths"
    yield name, traffic.rate(make, runs)
    yield f"{name}, sampled", traffic.rate(lambda: make(**SAMPLED), runs)
    yield f"{name}, filtered", traffic.rate(lambda: make(**FILTERED), runs)
    yield f"{name}, all three", traffic.rate(each, runs)


def shared(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    rates: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(runs):
        (prefix,) = traffic.prompts(1, 2_000)
        for found in rates.values():
            prompts = [[*prefix, *rest] for rest in traffic.prompts(256, 32)]
            seconds, _ = traffic.serve(traffic.requests(prompts, 128))
            found.append(256 * 128 / seconds)
    for name, found in rates.items():
        rate = statistics.median(found)
        yield f"256 share 2,000 tokens, {name}", f"{rate:,.0f} tokens/s {spread(found)}"


def chats(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    def make() -> list[Request]:
        lengths, tokens = traffic.rng.integers((20, 50), (200, 250), (1000, 2)).T
        prompts = [traffic.prompts(1, length)[0] for length in lengths]
        return traffic.requests(prompts, tokens, **SAMPLED)

    yield "1,000 short chats", traffic.rate(make, runs)


def bursts(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    """16 prompts of 600 tokens at a time, on average two such bursts a second."""
    found = []
    for _ in range(runs):
        arrivals = np.repeat(traffic.rng.exponential(0.5, 16).cumsum(), 16)
        requests = traffic.requests(traffic.prompts(256, 600), 100, **SAMPLED)
        _, times = traffic.serve(requests, arrivals)
        found.append([1e3 * times[int(q * 255)] for q in (0.5, 0.9, 0.99)])
    ms = np.median(found, axis=0)
    yield (
        "bursts of 16",
        "first token {:.0f}, {:.0f}, {:.0f} ms (50, 90, 99 %)".format(*ms),
    )


def poisson(traffic: Traffic, runs: int) -> Iterator[tuple[str, str]]:
    """Prompts of 20 to 12,000 tokens, answers of 10 to 900: lognormal, 400 a run."""
    rng = np.random.default_rng(2)
    lengths = np.exp(rng.normal(np.log(900), 1.2, 400)).clip(20, 12_000).astype(int)
    tokens = np.exp(rng.normal(np.log(190), 0.9, 400)).clip(10, 900).astype(int)
    intervals = rng.exponential(1, 400).cumsum()

    def make() -> list[Request]:
        prompts = [traffic.prompts(1, length)[0] for length in lengths]
        return traffic.requests(prompts, tokens, **SAMPLED)

    seconds = statistics.median(traffic.serve(make())[0] for _ in range(runs))
    yield "400 at once", f"{400 / seconds:.2f} requests/s"
    for rate in traffic.rates:
        found = []
        for _ in range(runs):
            gaps: list[float] = []
            _, times = traffic.serve(make(), intervals / rate, gaps)
            found.append([*np.percentile(times, (50, 90, 99)),
                          *np.percentile(gaps, (50, 99))])  # fmt: skip
        ms = 1e3 * np.median(found, axis=0)
        yield (
            f"arrivals, {rate:g} a second",
            "first token {:.0f}, {:.0f}, {:.0f} ms (50, 90, 99 %), between tokens "
            "{:.1f}, {:.1f} ms (50, 99 %)".format(*ms),
        )


LOADS = {
    each.__name__: each
    for each in (
        decode, host, first, turns, batches, long, mixed, shared, chats, bursts, poisson
    )
}  # fmt: skip


def start(given: argparse.Namespace) -> Traffic:
    backend = CudaBackend(Device("cuda:0"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.model} "
          f"{given.quantize}; "
          f"ceilings: copies {copy_rate() / 1e12:.2f} TB/s, products "
          f"{products_rate() / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip
    products.LEAST_COPIED = given.copied_from
    loaded, _ = load(
        backend, given.model, given.layers, given.quantize,
        weight_copies=given.weight_copies,
    )  # fmt: skip
    config = EngineConfig(
        max_batch=given.rows, context=given.context, cache_bytes=given.cache_bytes,
        token_budget=given.token_budget,
    )  # fmt: skip
    limits = plan_limits(loaded.model, loaded.config, backend, config)
    runner = LocalRunner(backend, loaded, limits)
    before, began = torch.cuda.mem_get_info()[0], time.perf_counter()
    runner.warm_up()
    seconds = time.perf_counter() - began
    memory = before - torch.cuda.mem_get_info()[0]
    print(f"{len(runner.limits.buckets)} programs in {seconds:.1f} s and "
          f"{memory / 1e9:.2f} GB; cache for {limits.blocks[0] * limits.block_size:,} "
          "tokens", flush=True)  # fmt: skip
    policy = SchedulerConfig(token_budget=limits.token_budget, context=given.context)
    return Traffic(EngineCore(runner, policy), limits.vocab)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="0: as the shape has")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--context", type=int, default=40_000)
    parser.add_argument("--cache-bytes", type=int, default=None)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quantize", default="", choices=KINDS)
    parser.add_argument("--rates", nargs="+", type=float, default=[8.2, 10.9, 12.9],
                        help="requests a second of the load poisson")  # fmt: skip
    parser.add_argument("--token-budget", type=int, help="tokens of a step [8192]")
    parser.add_argument("--weight-copies", action="store_true", help="of int4 in E4M3")
    parser.add_argument("--copied-from", type=int, default=products.LEAST_COPIED,
                        help="fewest rows that multiply copies")  # fmt: skip
    parser.add_argument("--wide", action="store_true", help="int4 in groups of 128")
    given = parser.parse_args()
    Random.wide_groups = given.wide
    traffic = start(given)
    traffic.rates = given.rates
    for name in given.loads:
        for what, figure in LOADS[name](traffic, given.runs):
            print(f"{what:42} {figure}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
