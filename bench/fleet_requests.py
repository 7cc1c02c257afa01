"""Time that the front-end of a fleet adds to a request, beside one engine.

    python bench/fleet_requests.py --requests 2000
    python bench/fleet_requests.py --path
    python bench/fleet_requests.py --all

One client sends requests of one token, one after the other, in turns to

- an engine that accepts connections itself,
- a front-end process of such an engine (``--frontends 1``),
- the front-end of a fleet of one engine.

Each runs in processes of its own, on an engine that answers at once
(``serve_instant.py``). Printed are p10, p50 and p99 of the time of a request, what the
first two are above those of one engine, and medians of the processor time of a request
in front-end and engine. On a busy machine only p10 and processor time say much.

``--path`` is what a fleet's front-end does with a request in Python beyond any
front-end's work: it admits it, chooses an engine, and passes the answer on. Messages
are encoded and decoded, but no other process or network is asked, so that other
programs count little; printed is processor time for prompts of several lengths.

``--all`` prints both, and the index's times and memory from 1 to 10,000 replicas
(``fleet.py --lookup``).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import logging
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fleet import look_up
from serve_instant import instant_engine

from inl.config import EngineConfig
from inl.fleet.client import FleetClient
from inl.fleet.engine_link import EngineLink
from inl.fleet.engine_port import EnginePort
from inl.fleet.server import FleetServer
from inl.serve.frontends.messages import (
    Answered,
    End,
    Leave,
    ModelSettings,
    News,
    Replica,
    Submit,
    ToEngine,
    decode,
    encode,
)
from inl.serve.frontends.outputs import RemoteHandle, RemoteRequest
from inl.serve.http_server import loop_factory
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig

PLACES = 32
PATH = "/v1/completions"


def serve(pipe: Connection, kind: str, address: str) -> None:
    """Serve until the process is ended; sends its address.

    kind: "engine" accepts connections, "front-end" has a process for them, "port"
    serves front-ends of a fleet, and "fleet" is one, of the engine at an address.
    """
    logging.getLogger("inl.serve.access").disabled = True
    config = ServerConfig(port=0, frontends=int(kind == "front-end"))

    async def run() -> None:
        if kind == "fleet":
            await FleetServer([address], config).serve(pipe.send)
            return
        settings = engine_config(EngineConfig(), config, PLACES)
        source = ModelSource(
            "instant", lambda on_step: instant_engine(settings, 0.0, on_step=on_step)
        )
        server = Server([source], config, max_batch=PLACES)
        if kind == "port":
            server.port = EnginePort(server, "127.0.0.1:0", None)

        def started(place: str) -> None:
            ends = server.frontends
            pids = [] if ends is None else [each.pid for each in ends.processes]
            pipe.send((place, pids))

        await server.serve(started)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


class Target:
    """Processes that answer requests at an address."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self._processes: list[Any] = []
        self.engine_pids: list[int] = []
        self.front_pids: list[int] = []
        if kind == "fleet":
            address, _ = self._start("port", "")
            self.engine_pids = [self._processes[-1].pid]
            url = self._start("fleet", address)
            self.front_pids = [self._processes[-1].pid]
        else:
            url, self.front_pids = self._start(kind, "")
            self.engine_pids = [self._processes[-1].pid]
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port)
        self.seconds: list[float] = []
        self.used: list[tuple[float, float]] = []
        """Processor time of front-end and engine before each request."""

    def _start(self, kind: str, address: str) -> Any:
        context = multiprocessing.get_context("spawn")
        near, far = context.Pipe()
        process = context.Process(target=serve, args=(far, kind, address), daemon=True)
        process.start()
        self._processes.append(process)
        return near.recv()

    def ask(self, body: bytes) -> None:
        """Send a request; keep its time, and the processor time so far."""
        self.used.append((run_seconds(self.front_pids), run_seconds(self.engine_pids)))
        began = time.perf_counter()
        self._connection.request("POST", PATH, body)
        response = self._connection.getresponse()
        answer = response.read()
        self.seconds.append(time.perf_counter() - began)
        assert response.status == 200, answer

    def reset(self) -> None:
        """Begin to measure."""
        self.seconds.clear()
        self.used.clear()

    def processor_seconds(self) -> list[float]:
        """Return the medians of a request in front-end and engine."""
        return [
            statistics.median(b - a for a, b in itertools.pairwise(each))
            for each in zip(*self.used, strict=True)
        ]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
            process.join()


class Answering(EngineLink):
    """The link to an engine that answers in this process."""

    def __init__(self, client: FleetClient) -> None:
        super().__init__("127.0.0.1:1", None, client)
        self._client = client
        client.engines.append(self)
        model = ModelSettings("m", (), None, 1 << 20)
        identity = {"model": "m"}
        self._open(
            Replica(b"", [model], identity, "cpu:0", PLACES, 1 << 20, 1 << 20, {}, [0])
        )

    def leave(self, message: Leave) -> None:
        """Encode the end of a request."""
        self.send(message)

    def send(self, message: ToEngine) -> None:
        """Answer a request, through the bytes of all messages."""
        found = decode(encode(message))
        if isinstance(found, Submit):
            number = found.first
            end = End(number, "length", False, None, None)
            news = News([number], [[7]], [(number, 0)], [], [end])
            loop = asyncio.get_running_loop()
            loop.call_soon(self._receive, decode(encode(Answered(number))))
            loop.call_soon(self._receive, decode(encode(news)))


async def measure_path(requests: int) -> None:
    """Print the processor time of a request in the client of a fleet."""
    client = FleetClient(ServerConfig())
    Answering(client)
    print("| prompt tokens | µs of a processor |\n|---|---|")
    for tokens in (64, 512, 4096):
        rounds = []
        for round_ in range(-1, 7):
            began = time.thread_time()
            for number in range(requests):
                await _ask(client, [round_ * requests + number] + [5] * (tokens - 1))
            rounds.append((time.thread_time() - began) / requests * 1e6)
        print(f"| {tokens} | {statistics.median(rounds[1:]):.0f} |")


async def _ask(client: FleetClient, prompt: list[int]) -> None:
    """Let the client answer one request."""
    number = client.numbers(1)
    handle = RemoteHandle(RemoteRequest(number, prompt, None, None), None, {})
    done = asyncio.Event()
    handle.listener = done.set
    with client.outputs.open([handle], lambda _: None):
        options = {"max_tokens": 1, "seed": 1, "stop_ids": []}
        await client.call(
            number, Submit(number, "m", "key", [prompt], options, 1, None, "request")
        )
        while not handle.completed:
            await done.wait()
            done.clear()
        client.send(Leave(number, finished=True))


def run_seconds(pids: list[int]) -> float:
    """Return the processor time of all threads of processes, to the nanosecond."""
    return 1e-9 * sum(
        int(each.read_text().split()[0])
        for pid in pids
        for each in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def body_of(number: int, tokens: int, stream: bool) -> bytes:
    """Return a request of 64 prompt tokens that no other one has."""
    prompt = [(number * 7 + at * 13) % 40_000 for at in range(64)]
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return json.dumps({**body, "ignore_eos": True, "stream": stream}).encode()


def p10_p50_p99(seconds: list[float]) -> list[float]:
    """Return percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return [1e3 * cuts[at - 1] for at in (10, 50, 99)]


def measure_requests(given: argparse.Namespace) -> None:
    """Print times of requests to one engine and to a fleet of one."""
    targets = [
        Target("one engine", "engine"),
        Target("its front-end process", "front-end"),
        Target("a fleet of one engine", "fleet"),
    ]
    for number in range(-200, given.requests):
        if not number:
            for target in targets:
                target.reset()
        # Another order each time: what runs beside disturbs all alike.
        first = number % len(targets)
        for target in [*targets[first:], *targets[:first]]:
            target.ask(body_of(number, given.tokens, given.stream))
    one = p10_p50_p99(targets[0].seconds)
    print(
        "| requests to | ms p10 | p50 | p99 | added p10 | added p50 "
        "| front-end µs | engine µs |\n|---|---|---|---|---|---|---|---|"
    )
    for target in targets:
        found = p10_p50_p99(target.seconds)
        row = *found, found[0] - one[0], found[1] - one[1]
        used = [each * 1e6 for each in target.processor_seconds()]
        print(
            f"| {target.name} |",
            *(f"{each:.3f} |" for each in row),
            *(f"{each:.0f} |" for each in used),
        )
        target.close()
    print(f"\nload {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--path", action="store_true")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if given.all:
        look_up(argparse.Namespace(seed=0, max_blocks=1 << 22))
        print()
    if given.path or given.all:
        asyncio.run(measure_path(given.requests))
        print()
    if not given.path:
        measure_requests(given)


if __name__ == "__main__":
    main()
