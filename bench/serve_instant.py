"""Processor time of each token that the server streams, without the cost of a model.

    python bench/serve_instant.py --clients 64 --frontends 0 1 2
    python bench/serve_instant.py --clients 512 --step-ms 2.3 --frontends 0 4 8

The runner answers at once, or after ``--step-ms`` without the interpreter's lock, as a
GPU does; text is the default model's. The server runs in this process, front-ends and
clients in others. Printed are tokens/s, and microseconds of processor time per token of
each kind of process, which depend little on what else runs on the machine; first those
of ``engine.generate``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host_steps import Instant
from serve_overhead import Clients, generate

from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import open_model
from inl.protocol.runner import Limits, Reply
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig

CONTEXT = 512


class Timed(Instant):
    """Answers ``seconds`` after the step before."""

    def __init__(self, limits: Limits, seconds: float) -> None:
        super().__init__(limits)
        self._seconds = seconds
        self._free = 0.0

    def collect(self) -> Reply:
        if self._seconds:
            self._free = max(self._free, time.perf_counter() - self._seconds)
            self._free += self._seconds
            time.sleep(max(self._free - time.perf_counter(), 0))
        return super().collect()


def instant_engine(
    config: EngineConfig, seconds: float, **options: Any
) -> InferenceEngine:
    """Return an engine without weights, with the default model's tokenizer."""
    model = open_model(resolve_model(None))
    blocks = CONTEXT // 16
    limits = Limits(
        slots=config.max_batch + 1,
        blocks=(blocks * config.max_batch + 1,),
        block_size=16,
        max_blocks_per_seq=blocks,
        vocab=model.config.vocab_size,
        sampler="sample_filtered",
        token_budget=2048,
        depth=2,
    )
    runner = Timed(limits, seconds)
    return InferenceEngine(model, config=config, runner=runner, **options)


def used_seconds(pids: Sequence[int]) -> float:
    """Return the processor time of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class ThreadServer:
    """A server on a thread of this process."""

    def __init__(self, clients: int, frontends: int, seconds: float) -> None:
        config = ServerConfig(port=0, frontends=frontends, max_queue=clients)
        settings = engine_config(EngineConfig(), config, clients)
        source = ModelSource(
            "instant",
            lambda on_step: instant_engine(settings, seconds, on_step=on_step),
        )
        self._sources, self._config, self._batch = [source], config, clients
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = Server(self._sources, self._config, max_batch=self._batch)
        await self.server.serve(lambda _: self._started.set())

    @property
    def pids(self) -> list[int]:
        """Front-end processes."""
        ends = self.server.frontends
        return [] if ends is None else [each.pid for each in ends.processes]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join()
        self.server.close()


def measure(given: argparse.Namespace, frontends: int) -> None:
    """Print the figures of one number of front-ends."""
    server = ThreadServer(given.clients, frontends, given.step_ms / 1e3)
    clients = Clients(server.server.url, given.clients, given.processes)
    clients.rate(0, 8)
    began = time.process_time(), used_seconds(server.pids)
    rates = [clients.rate(round_ + 1, given.tokens) for round_ in range(given.rounds)]
    tokens = given.rounds * given.clients * given.tokens
    here = (time.process_time() - began[0]) / tokens
    there = (used_seconds(server.pids) - began[1]) / tokens
    reads = given.clients * given.tokens / clients.reads
    print(
        f"front-ends {frontends}: {max(rates):8.0f} tokens/s, engine process "
        f"{here * 1e6:6.2f} us a token, front-ends {there * 1e6:6.2f}, "
        f"{reads:.2f} tokens a part",
        flush=True,
    )
    clients.close()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--processes", type=int, default=1, help="of the clients")
    parser.add_argument("--frontends", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0, help="of the runner")
    given = parser.parse_args()
    config = EngineConfig(max_batch=given.clients)
    with instant_engine(config, given.step_ms / 1e3) as engine:
        generate(engine, given.clients, 0, 8)
        began = time.process_time()
        rates = [
            generate(engine, given.clients, round_ + 1, given.tokens)
            for round_ in range(given.rounds)
        ]
        used = time.process_time() - began
        tokens = given.rounds * given.clients * given.tokens
        print(f"generate: {max(rates):8.0f} tokens/s, {used / tokens * 1e6:6.2f} us")
    logging.getLogger("inl.serve.access").disabled = True
    for count in given.frontends:
        measure(given, count)


if __name__ == "__main__":
    main()
