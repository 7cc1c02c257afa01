"""Two CPU engines beside one: cached prompt tokens and time to the first token.

    python bench/fleet_prefixes.py
    python bench/fleet_prefixes.py --rounds 3 --vllm-router PATH

Some clients hold conversations of some turns that begin with one of a few system
prompts, at the same time:

- with one engine that has all threads,
- with two of half the threads each, in turns (round robin),
- with those behind ``inl serve --replica``,
- with those behind vllm-router, if ``make test-router`` has made its environment, by
  events of the KV cache and in turns.

Each way has processes of its own in each round, so that caches are empty. The cache of
an engine holds about half of the conversations. Printed are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_processes import get, server

PATH = "/v1/completions"
SYSTEMS, SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 4, 384, 64, 16

Place = tuple[str, int]


@dataclass(frozen=True)
class Figures:
    """What one round of one way has shown."""

    cached: float
    """Share of the prompt tokens."""
    p50: float
    p99: float
    seconds: float
    """Of all conversations."""


def tokens(name: str, count: int) -> list[int]:
    """Return random tokens, the same for a name."""
    draw = random.Random(name)
    return [draw.randrange(300, 40_000) for _ in range(count)]


async def stream(place: Place, prompt: list[int]) -> tuple[float, Any]:
    """Return the time to the first token of a stream, and its usage."""
    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection(*place)
    began, first, usage = time.perf_counter(), None, None
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            usage = json.loads(line[6:]).get("usage") or usage
    writer.close()
    assert first is not None, "an answer has a token"
    return first, usage


async def converse(
    places: Callable[[], Place], given: argparse.Namespace, round_: int, talks: int
) -> Figures:
    """Hold all conversations, some at the same time."""
    numbers, firsts, usages = iter(range(talks)), [], []

    async def client() -> None:
        for number in numbers:
            prompt = tokens(f"system {number % SYSTEMS} {round_}", SYSTEM_TOKENS)
            for turn in range(given.turns):
                name = f"{round_} {number} {turn}"
                prompt = [*prompt, *tokens(name, TURN_TOKENS)]
                first, usage = await stream(places(), prompt)
                firsts.append(first)
                usages.append(usage)
                prompt += tokens(f"{name} answer", ANSWER_TOKENS)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(given.clients)))
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    cuts = statistics.quantiles(firsts, n=100)
    return Figures(
        cached / sum(each["prompt_tokens"] for each in usages),
        cuts[49],
        cuts[98],
        time.perf_counter() - began,
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let processes that are started meanwhile compute with so many threads."""
    before = os.environ.get("INL_THREADS")
    os.environ["INL_THREADS"] = str(count)
    try:
        yield
    finally:
        os.environ.pop("INL_THREADS")
        if before is not None:
            os.environ["INL_THREADS"] = before


@contextmanager
def process(command: list[str], found: re.Pattern[str]) -> Iterator[str]:
    """Run a command; yields what the pattern finds in its log."""
    with tempfile.NamedTemporaryFile("w+") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not (match := found.search(Path(log.name).read_text())):
                if running.poll() is not None:
                    raise RuntimeError(Path(log.name).read_text())
                time.sleep(0.1)
            yield match[1]
        finally:
            running.terminate()
            running.wait()


def free_ports(count: int) -> list[int]:
    """Return free ports of this host."""
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in opened]


class Ways:
    """Starts the processes of each way, and says where its requests go."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._engine = ["--device", "cpu", "--max-batch", str(given.batch)]
        self._engine += ["--context", "1024"]
        self._cores = len(os.sched_getaffinity(0))
        self._router = given.vllm_router
        self.all: dict[str, Callable[[ExitStack], Callable[[], Place]]] = {
            "one engine": self.one,
            "two, round robin": self.turns,
            "two, `inl serve --replica`": self.fleet,
        }
        if self._router is not None:
            self.all["two, vllm-router kv_aware"] = lambda s: self.outside(
                s, "kv_aware"
            )
            name = "two, vllm-router round_robin"
            self.all[name] = lambda s: self.outside(s, "round_robin")

    def _servers(self, stack: ExitStack, count: int, *options: str) -> list[Place]:
        with threads(max(self._cores // count, 1)):
            found = [
                stack.enter_context(server(*self._engine, *options))
                for _ in range(count)
            ]
        return [(host, port) for host, port, _ in found]

    def one(self, stack: ExitStack) -> Callable[[], Place]:
        (place,) = self._servers(stack, 1)
        return lambda: place

    def turns(self, stack: ExitStack) -> Callable[[], Place]:
        return itertools.cycle(self._servers(stack, 2)).__next__

    def fleet(self, stack: ExitStack) -> Callable[[], Place]:
        options = []
        command = [sys.executable, "-m", "inl", "serve", "--engine-only"]
        with threads(max(self._cores // 2, 1)):
            for port in free_ports(2):
                listen = ["--listen", f"127.0.0.1:{port}"]
                line = re.compile(rf"(127\.0\.0\.1:{port})")
                address = stack.enter_context(
                    process([*command, *self._engine, *listen], line)
                )
                options += ["--replica", address]
        host, port, _ = stack.enter_context(server(*options))
        wait_ready(host, port, "/load")
        return lambda: (host, port)

    def outside(self, stack: ExitStack, policy: str) -> Callable[[], Place]:
        command = [self._router, "--host", "127.0.0.1", "--policy", policy]
        urls, sources = [], []
        with threads(max(self._cores // 2, 1)):
            for _ in range(2):
                ports = free_ports(2)
                events, again = (f"tcp://127.0.0.1:{port}" for port in ports)
                options = ["--kv-events", events.replace("127.0.0.1", "*")]
                options += ["--kv-events-replay", again.replace("127.0.0.1", "*")]
                host, port, _ = stack.enter_context(server(*self._engine, *options))
                url = f"http://{host}:{port}"
                urls.append(url)
                sources += ["--kv-event-source", f"{url}={events}"]
                sources += ["--kv-event-replay-source", f"{url}={again}"]
        if policy == "kv_aware":
            name = asyncio.run(get(host, port, "/v1/models"))["data"][0]["id"]
            command += ["--kv-event-model", name, "--kv-event-block-size", "16"]
            command += sources
        port, metrics = free_ports(2)
        command += ["--port", str(port), "--prometheus-port", str(metrics)]
        stack.enter_context(
            process([*command, "--worker-urls", *urls], re.compile("()"))
        )
        wait_ready("127.0.0.1", port, "/health")
        return lambda: ("127.0.0.1", port)


def wait_ready(host: str, port: int, path: str) -> None:
    """Wait until a server answers, and all engines that it lists are ready."""
    while True:
        with suppress(OSError):
            connection = http.client.HTTPConnection(host, port)
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read()
            connection.close()
            states = re.findall(rb'"state": ?"(\w+)"', text)
            if response.status == 200 and set(states) <= {b"ready"}:
                return
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    router = Path(".venv-router/bin/vllm-router")
    parser.add_argument(
        "--vllm-router", help="its command", default=router if router.exists() else None
    )
    given = parser.parse_args()
    ways = Ways(given).all
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for round_ in range(given.rounds):
        for name, start in ways.items():
            with ExitStack() as stack:
                places = start(stack)
                asyncio.run(converse(places, given, -1, given.clients))  # warms up
                figures = asyncio.run(converse(places, given, round_, given.talks))
                found[name].append(figures)
                print(f"{name}: {figures}", file=sys.stderr, flush=True)
    load = os.getloadavg()[0]
    print(f"{given.talks} conversations of {given.turns} turns, {given.clients} at a "
          f"time, median of {given.rounds} rounds; load {load:.1f}\n")  # fmt: skip
    print("| engines | cached | first token p50 | p99 | seconds in all |")
    print("|---|---|---|---|---|")
    for name, rounds in found.items():
        middle = [
            statistics.median(getattr(each, field) for each in rounds)
            for field in ("cached", "p50", "p99", "seconds")
        ]
        print(f"| {name} | {middle[0]:.1%} | {middle[1] * 1e3:.0f} ms "
              f"| {middle[2] * 1e3:.0f} ms | {middle[3]:.1f} |")  # fmt: skip


if __name__ == "__main__":
    main()
