"""Time that the front-end of a fleet adds to a request, beside one engine.

    python bench/fleet_requests.py --requests 2000

One client sends requests of one token, one after the other, in turns to

- an engine that accepts connections itself,
- a front-end process of such an engine (``--frontends 1``),
- the front-end of a fleet of one engine.

Each runs in processes of its own, on an engine that answers at once
(``serve_instant.py``). Printed are p10, p50 and p99 of the time of a request, what the
first two are above those of one engine, and medians of the processor time of a request
in front-end and engine. On a busy machine only p10 and processor time say much.
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

from serve_instant import instant_engine

from inl.config import EngineConfig
from inl.fleet.engine_port import EnginePort
from inl.fleet.server import FleetServer
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
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


if __name__ == "__main__":
    main()
