"""Prompts computed on one GPU and decoded on another, against two whole engines.

    python bench/prefill_decode.py                      # on a machine with two GPUs
    python bench/prefill_decode.py --deployments replicas split split:nixl
    python bench/prefill_decode.py --device cpu --shape tiny --dtype float32 \\
        --rates 4 --seconds 4 --median 200 --spread 0.3 --context 1024 --tokens 8 16

Each engine is a process with an HTTP server, as ``inl serve`` starts it, on a device of
its own: "replicas" are two that do everything, the one with fewer open requests getting
the next one; "split" is ``--role prefill`` and ``--role decode`` over TCP, and
"split:NAME" over the transport of a plugin. All get the same requests: prompts of
lognormal lengths, answers of ``--tokens``, Poisson arrivals. Weights are random.

A request is good if its first token came within ``--first-token-ms``, and 99 % of the
times between its tokens are within ``--inter-token-ms``, for which the engines are set.
Goodput is good requests for each second of arrivals; below it stand what other limits
of the same answers would give, and how long prompts took to arrive. Rates beyond the
first at which less than a tenth was good are not tried.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from kv_tiers import cache_bytes
from random_models import SHAPES, random_language

from inl import EngineConfig, InferenceEngine
from inl.serve.http_server import loop_factory
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig

TOKEN_IDS = re.compile(rb'"token_ids":\s*\[([^\]]*)\]')
TICKETS = re.compile(r'^inl:remote_prefill_total\{.*kind="(\w+)".*\} (\S+)$', re.M)
START_SECONDS = 300.0


class Ask(NamedTuple):
    """A request, and when it arrives."""

    at: float
    prompt: list[int]
    tokens: int


@dataclass(slots=True)
class Answer:
    """Times of one request's tokens, in seconds since its arrival."""

    times: list[float] = field(default_factory=list)
    is_whole: bool = False

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def slow(self) -> float:
        """The 99th percentile of the seconds between two tokens."""
        gaps = sorted(b - a for a, b in itertools.pairwise(self.times))
        return gaps[max(-(-99 * len(gaps) // 100) - 1, 0)] if gaps else 0.0

    def is_good(self, first: float, inter: float) -> bool:
        return self.is_whole and self.first <= first and self.slow <= inter


def serve(pipe: Connection, options: argparse.Namespace, **settings: Any) -> None:
    """Serve one engine until the process is ended; sends its address, or an error."""
    logging.getLogger("inl.serve.access").disabled = True
    config = ServerConfig(port=0, max_queue=4096, max_queued_tokens=1 << 24)
    made = EngineConfig(
        dtype=options.dtype, context=options.context, check_weights=False,
        warm_up=True, inter_token_ms=options.inter_token_ms * options.share, **settings,
    )  # fmt: skip

    def opened(on_step: Any) -> InferenceEngine:
        language = random_language(options.shape, options.context)
        return InferenceEngine(
            language, config=engine_config(made, config, options.rows), on_step=on_step
        )

    async def run() -> None:
        source = ModelSource("random", opened)
        server = Server([source], config, max_batch=options.rows)
        await server.serve(pipe.send)

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


class Engines:
    """Processes of one deployment; ``urls`` are those that requests go to."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._processes: list[Any] = []
        self._options = options
        begun = time.perf_counter()
        sizes = {"cache_bytes": options.cache_bytes}
        if name == "replicas":
            started = [
                self._begin(backend=device, **sizes) for device in options.devices
            ]
            self.urls = [self._started(pipe) for pipe in started]
        else:
            transport = name.partition(":")[2] or None
            far, near = options.devices
            split = {"kv_transport": transport, "kv_peer": free_address(), **sizes}
            prefill = self._begin(backend=far, role="prefill", **split)
            decode = self._begin(
                backend=near, role="decode", kv_host=options.kv_host, **split
            )
            self._started(prefill)
            self.urls = [self._started(decode)]
        self.seconds = time.perf_counter() - begun

    def _begin(self, **settings: Any) -> Connection:
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(
            target=serve, args=(far, self._options), kwargs=settings, daemon=True
        )
        process.start()
        far.close()
        self._processes.append(process)
        return near

    def _started(self, pipe: Connection) -> str:
        if not pipe.poll(START_SECONDS):
            raise RuntimeError(f"an engine has not started in {START_SECONDS:g} s")
        url: str = pipe.recv()
        if not url.startswith("http"):
            raise RuntimeError(f"an engine has not started: {url}")
        return url

    def tickets(self) -> dict[str, int]:
        """Return what prompts of the first engine were counted as elsewhere."""
        with urllib.request.urlopen(f"{self.urls[0]}/metrics") as response:
            found = TICKETS.findall(response.read().decode())
        return {kind: int(float(count)) for kind, count in found if float(count)}

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(30)
            process.kill()


def free_address() -> str:
    """Return an address of this machine that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@contextmanager
def engines(name: str, options: argparse.Namespace) -> Iterator[Engines]:
    """Start the engines of a deployment, and end them."""
    found = Engines(name, options)
    try:
        yield found
    finally:
        found.close()


def drawn(options: argparse.Namespace, rate: float, seed: int) -> list[Ask]:
    """Return the requests of a rate, the same for all deployments."""
    rng = np.random.default_rng([seed, round(1000 * rate)])
    vocab, asks, at = SHAPES[options.shape][0], [], 0.0
    most = options.context - options.tokens[1] - 1
    while (at := at + rng.exponential(1 / rate)) < options.seconds:
        length = int(np.exp(rng.normal(np.log(options.median), options.spread)))
        prompt = rng.integers(0, vocab, min(max(length, 16), most)).tolist()
        asks.append(Ask(at, prompt, int(rng.integers(*options.tokens, endpoint=True))))
    return asks


async def asked(url: str, ask: Ask, answer: Answer, began: float) -> None:
    """Send a request when it arrives, and keep the times of its tokens."""
    place = urlsplit(url)
    body = json.dumps({
        "model": "random", "prompt": ask.prompt, "max_tokens": ask.tokens,
        "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(
        place.hostname, place.port, limit=1 << 20
    )
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        while line := await reader.readline():
            now = time.perf_counter() - began - ask.at
            if found := TOKEN_IDS.search(line):
                answer.times += [now] * (len(found[1].split(b",")) if found[1] else 0)
        answer.is_whole = len(answer.times) == ask.tokens
    finally:
        writer.close()


async def load(urls: Sequence[str], asks: Sequence[Ask], rest: float) -> list[Answer]:
    """Send all requests; those open ``rest`` seconds after the last end."""
    answers = [Answer() for _ in asks]
    opened = dict.fromkeys(urls, 0)
    began = time.perf_counter()

    async def one(ask: Ask, answer: Answer) -> None:
        await asyncio.sleep(max(ask.at - (time.perf_counter() - began), 0))
        url = min(opened, key=lambda each: opened[each])
        opened[url] += 1
        try:
            await asked(url, ask, answer, began)
        finally:
            opened[url] -= 1

    jobs = [asyncio.create_task(one(*each)) for each in zip(asks, answers, strict=True)]
    _, late = await asyncio.wait(jobs, timeout=asks[-1].at + rest)
    for job in late:
        job.cancel()
    found = await asyncio.gather(*jobs, return_exceptions=True)
    failed = [each for each in found if isinstance(each, Exception)]
    if failed:
        print(f"  {len(failed)} requests failed, the first: {failed[0]!r}")
    return answers


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by nearest rank in milliseconds; infinite without values."""
    ordered = sorted(values)
    if not ordered:
        return float("inf")
    return 1e3 * ordered[max(-int(-share * len(ordered) // 1) - 1, 0)]


def measured(name: str, options: argparse.Namespace) -> dict[float, float]:
    """Print the figures of a deployment at each rate; return its goodput."""
    first, inter = options.first_token_ms / 1e3, options.inter_token_ms / 1e3
    found: dict[float, float] = {}
    with engines(name, options) as running:
        print(f"{name}: started in {running.seconds:.0f} s", flush=True)
        warm = drawn(options, 4.0, 1)[: 2 * len(running.urls)]
        asyncio.run(load(running.urls, warm, 120.0))
        before = running.tickets()
        for rate in options.rates:
            asks = drawn(options, rate, 2)
            answers = asyncio.run(load(running.urls, asks, options.rest))

            def good(
                first: float, inter: float, answers: Sequence[Answer] = answers
            ) -> float:
                count = sum(each.is_good(first, inter) for each in answers)
                return count / options.seconds

            begun = [each for each in answers if each.times]
            found[rate] = good(first, inter)
            firsts = [each.first for each in begun]
            slow = [each.slow for each in begun]
            print(
                f"  {rate:5.2f} requests/s of {len(asks)}: goodput "
                f"{found[rate]:5.2f}, first token {percentile(firsts, 0.5):.0f} / "
                f"{percentile(firsts, 0.99):.0f} ms, between tokens "
                f"{percentile(slow, 0.5):.1f} / {percentile(slow, 0.99):.1f} ms (each "
                "request's p99; of them median and p99), whole "
                f"{sum(each.is_whole for each in answers)}"
            )
            others = (
                f"{1e3 * a:.0f} + {1e3 * b:.0f} ms: {good(a, b):.2f}"
                for a, b in ((first, inter / 2), (first, 2 * inter), (4 * first, inter))
            )
            print("        with other limits: " + ", ".join(others), flush=True)
            if found[rate] * options.seconds < 0.1 * len(asks):
                break
        after = running.tickets()
        counts = {kind: after[kind] - before.get(kind, 0) for kind in after}
        if name != "replicas":
            print(f"  prompts elsewhere: {counts}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--device", help="of both engines, such as cpu")
    parser.add_argument("--deployments", nargs="+", default=["replicas", "split"])
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--median", type=float, default=5000, help="prompt tokens")
    parser.add_argument("--spread", type=float, default=0.4, help="of their logarithm")
    parser.add_argument("--tokens", type=int, nargs=2, default=[128, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 6])
    parser.add_argument("--seconds", type=float, default=12, help="of each rate")
    parser.add_argument("--rest", type=float, default=12, help="after the last arrival")
    parser.add_argument("--first-token-ms", type=float, default=2000)
    parser.add_argument("--inter-token-ms", type=float, default=50)
    parser.add_argument(
        "--share", type=float, default=0.8,
        help="of this limit that steps are expected to take at most",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cache-tokens", type=int, help="of each engine")
    parser.add_argument("--kv-host", default="16GiB", help="of the decoding engine")
    options = parser.parse_args()
    if options.device:
        options.devices = [options.device] * 2
    options.cache_bytes = options.cache_tokens and cache_bytes(
        options.shape, options.dtype, options.cache_tokens
    )
    print(
        f"{options.shape} {options.dtype} on {', '.join(options.devices)}; prompts of "
        f"{options.median:g} tokens (log spread {options.spread:g}), answers of "
        f"{options.tokens[0]} to {options.tokens[1]}; limits "
        f"{options.first_token_ms:g} ms to the first token, "
        f"{options.inter_token_ms:g} ms between tokens; {os.cpu_count()} cores",
        flush=True,
    )
    found = {name: measured(name, options) for name in options.deployments}
    print("\ngoodput, requests/s\n| requests/s |", " | ".join(found), "|")
    print("|---" * (1 + len(found)) + "|")
    for rate in options.rates:
        cells = (each.get(rate) for each in found.values())
        shown = ("-" if each is None else f"{each:.2f}" for each in cells)
        print(f"| {rate:g} |", " | ".join(shown), "|")
    best = {name: max(each.values()) for name, each in found.items()}
    name = max(best, key=lambda each: best[each])
    print(
        "most: " + ", ".join(f"{each} {best[each]:.2f}" for each in best)
        + f"; {name} serves most"
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
