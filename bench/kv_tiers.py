"""A long prefix from host memory and from files, against computing it.

``python bench/kv_tiers.py --device cuda:0`` makes a model of ``--shape`` with random
weights, whose cache has room for little more than one prompt of ``--tokens`` tokens.
In each of ``--runs`` rounds, after one that compiles, a prompt is computed in an empty
cache, asked for again, evicted by another one, and read from host memory; then
from files whose pages the system has dropped. Answers must be equal. Each figure is the
median. The rate of the disk is that of reading the same files with nothing else to do;
rates of pinned copies are measured beside.

Then ``--rows`` sequences decode in a full cache, with and without host memory that
evicted blocks are written to. Locking that memory costs more than copies to it do:
figures of the runs that fill it are separate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from random_models import SHAPES, random_language

from inl import EngineConfig, InferenceEngine
from inl.engine.benchmark import StepClock, random_prompts
from inl.kv_tiers.tiers import Costs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inl.engine.request_handle import Completion


class AlwaysPays(Costs):
    """Reads whatever a tier has, so that its time is known."""

    def pays(self, blocks: Mapping[str, int], tokens: int) -> bool:  # noqa: ARG002
        return True


BLOCKS_ABOVE = 1.02
"""Size of the cache, in prompts."""


def cache_bytes(shape: str, dtype: str, tokens: float) -> int:
    """Return the bytes of the keys and values of tokens."""
    _, _, _, layers, _, heads, dim, _ = SHAPES[shape]
    return int(tokens * layers * 2 * heads * dim * (4 if dtype == "float32" else 2))


def forget(engine: InferenceEngine) -> None:
    """Make the device forget all blocks."""
    for pool in engine.core.scheduler.kv_cache.pools:
        pool.forget()


def first_token(engine: InferenceEngine, prompt: list[int]) -> tuple[float, Completion]:
    """Return the time to the first token, and the answer."""
    found = engine.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
    return found.first_token_seconds, found


def drop_pages(folder: Path) -> int:
    """Drop the files of a folder from the system's memory; return their bytes."""
    os.sync()
    total = 0
    for path in folder.glob("*.kv"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        total += path.stat().st_size
    return total


def disk_rate(folder: Path) -> float:
    """Return the bytes per second of reading all files of a folder in turn."""
    total, started = drop_pages(folder), perf_counter()
    buffer = bytearray(16 << 20)
    for path in folder.glob("*.kv"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return total / (perf_counter() - started)


def copy_rates(device: str) -> str:
    """Return the rates of copies between a GPU and pinned memory."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    found = []
    for target, source in ((there, host), (host, there)):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            started = perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(perf_counter() - started)
        found.append((1 << 30) / median(times) / 1e9)
    return "pinned copies: {:.1f} GB/s to the device, {:.1f} to the host".format(*found)


def prefixes(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Measure the first token of a prompt from each place."""
    size = cache_bytes(options.shape, options.dtype, options.tokens + 96)
    config = EngineConfig(
        backend=options.device, dtype=options.dtype, context=options.tokens + 64,
        cache_bytes=int(size * BLOCKS_ABOVE), max_batch=2, check_weights=False,
        kv_host=str(4 * size), kv_disk=f"{8 * size}:{folder}",
    )  # fmt: skip
    seconds: dict[str, list[float]] = defaultdict(list)
    language = random_language(options.shape, options.tokens + 64)
    with InferenceEngine(language, config=config) as engine:
        assert engine.tiers is not None, "the config has tiers"
        assert engine.tiers.disk is not None, "the config has files"
        engine.tiers.costs = costs = AlwaysPays()
        prompts = random_prompts(engine, 2 * options.runs + 2, options.tokens, seed=1)
        for first in range(0, len(prompts), 2):
            found = memory_round(engine, prompts[first : first + 2])
            for name, time in found.items() if first else ():  # the first compiles
                seconds[name].append(time)
        found = {name: median(times) for name, times in seconds.items()}
        if "disk" not in options.measure:
            return found
        prompt, other = prompts[-2:]
        engine.tiers.host.clear()
        for each in (other, other[len(other) // 8 :]):  # one leaves leading blocks
            first_token(engine, each)
        engine.tiers.flush()
        found["disk rate"] = disk_rate(folder)
        times = []
        for _ in range(options.runs):
            engine.tiers.host.clear()
            forget(engine)
            drop_pages(folder)
            time, answer = first_token(engine, prompt)
            times.append(time)
        found["disk"] = median(times)
        wanted = first_token(engine, prompt)[1]
        check(engine, answer, wanted, options.tokens)
        hits = dict(engine.tiers.hits)
        for tier in hits:
            pays = Costs.pays(costs, {tier: 1}, engine.runner.limits.block_size)
            print(f"{tier}: {hits[tier]} blocks read; pays by measured costs: {pays}")
    return found


def memory_round(engine: InferenceEngine, prompts: list[list[int]]) -> dict[str, float]:
    """Measure one prompt without files; the other one evicts it."""
    prompt, other = prompts
    assert engine.tiers is not None, "the config has tiers"
    engine.tiers.host.clear()
    forget(engine)
    computed, wanted = first_token(engine, prompt)
    device, warm = first_token(engine, prompt)
    if warm.token_ids != wanted.token_ids:
        print("the end of the prompt alone gives another answer than all of it: the "
              "gap rule")  # fmt: skip
    evicting, _ = first_token(engine, other)
    storing, found = first_token(engine, prompt)
    check(engine, found, warm, len(prompt))
    first_token(engine, other)
    host, found = first_token(engine, prompt)
    check(engine, found, warm, len(prompt))
    return {
        "computed": computed, "computed, storing": evicting, "device": device,
        "host, storing": storing, "host": host,
    }  # fmt: skip


def check(
    engine: InferenceEngine, found: Completion, wanted: Completion, tokens: int
) -> None:
    """Require the answer, from blocks of a tier."""
    size = engine.runner.limits.block_size
    assert found.cached_tokens >= (tokens - 1) // size * size, found.cached_tokens
    assert found.token_ids == wanted.token_ids, (found.token_ids, wanted.token_ids)


def decoding(options: argparse.Namespace, host: str) -> list[float]:
    """Return tokens per second of all sequences in a cache without free blocks.

    Of each run: in those with host memory, that of the first ones is allocated.
    """
    clock, rows, tokens = StepClock(), options.rows, options.decoded
    size = cache_bytes(options.shape, options.dtype, rows * (256 + tokens) * 1.05)
    config = EngineConfig(
        backend=options.device, dtype=options.dtype, context=256 + tokens,
        cache_bytes=size, max_batch=rows, check_weights=False, kv_host=host,
    )  # fmt: skip
    language = random_language(options.shape, 256 + tokens)
    with InferenceEngine(language, config=config, on_step=clock.on_step) as engine:
        rates = []
        for run in range(1 + options.growing + options.runs):  # the first one compiles
            clock.begin(rows)
            engine.generate(
                random_prompts(engine, rows, 256, seed=run), max_tokens=tokens,
                ignore_eos=True, temperature=0,
            )  # fmt: skip
            rates.append(clock.tokens_per_second() or 0.0)
        if engine.tiers is not None:
            print(f"write-behind: {engine.tiers.host.used_bytes / 1e9:.2f} GB stored")
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--decoded", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kv-host", default="8GiB", help="while sequences decode")
    parser.add_argument(
        "--growing", type=int, default=2, help="runs that fill this memory"
    )  # fmt: skip
    parser.add_argument(
        "--measure", nargs="*", default=("disk", "decoding"),
        choices=("disk", "decoding"), help="beside host memory",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where files are made")
    options = parser.parse_args()
    if options.device.startswith("cuda"):
        print(copy_rates(options.device), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as base:
        found: dict[str, Any] = prefixes(options, Path(base) / "kv")
    rate = found.pop("disk rate", 0)
    for name, seconds in found.items():
        times = found["computed"] / seconds
        print(f"{name:<18} first token {seconds:8.3f} s, {times:6.2f} x computing")
    if rate:
        print(f"the disk reads {rate / 1e9:.2f} GB/s", flush=True)
    if "decoding" not in options.measure:
        return
    plain, behind = decoding(options, "0"), decoding(options, options.kv_host)
    start = options.growing
    for what, rates in (("plain", plain), ("with write-behind", behind)):
        each = ", ".join(f"{rate:.0f}" for rate in rates)
        print(f"decoding {median(rates[start:]):.0f} tokens/s {what} (runs: {each})")
    for what, part in (
        ("while its memory is allocated", slice(start)),
        ("afterwards", slice(start, None)),
    ):
        share = 1 - median(behind[part]) / median(plain[part])
        print(f"write-behind takes {share:.1%} {what}")


if __name__ == "__main__":
    main()
