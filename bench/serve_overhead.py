"""Tokens/s of streaming clients relative to ``engine.generate``, in one run.

    python bench/serve_overhead.py --clients 32 --rounds 5
    python bench/serve_overhead.py --device cuda:0 --clients 512 --processes 4 \\
        --frontends 8 --context 512 --tokens 128

Each round generates with an engine in this process, then with a server process of its
own; the other one is idle. The clients run on the same machine, in ``--processes``
processes of their own. They count bytes, and take the numbers of tokens from the usage
that each stream reports. ``serve_instant.py`` measures the server alone;
``thin_model.py`` packs the default model for a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from serve_processes import server
from serve_streams import stream_all

from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine

WORDS = ("time", "year", "people", "way", "day", "man", "woman", "life", "child")


def messages(clients: int, round_: int) -> list[list[dict[str, str]]]:
    """Return conversations that no other round has."""
    draw = random.Random(round_)
    texts = [" ".join(draw.choices(WORDS, k=48)) for _ in range(clients)]
    return [[{"role": "user", "content": text}] for text in texts]


def generate(engine: InferenceEngine, clients: int, round_: int, tokens: int) -> float:
    """Return the engine's tokens/s."""
    prompts = [engine.chat_ids(each) for each in messages(clients, round_)]
    began = time.perf_counter()
    done = engine.generate(prompts, max_tokens=tokens, ignore_eos=True)
    count = sum(len(each.token_ids) for each in done)
    return count / (time.perf_counter() - began)


class Clients:
    """Streaming clients in some processes of their own."""

    def __init__(self, url: str, clients: int, processes: int) -> None:
        self._url, self._clients, self._parts = url, clients, processes
        self.reads = 0
        """Parts in which the streams of the last round arrived."""
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, spawn)

    def rate(self, round_: int, tokens: int) -> float:
        """Return the tokens/s that all receive together."""
        options = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        options |= {"stream": True, "stream_options": {"include_usage": True}}
        talks = messages(self._clients, round_)
        bodies = [{"messages": each, **options} for each in talks]
        began = time.perf_counter()
        parts = [bodies[start :: self._parts] for start in range(self._parts)]
        found = self._pool.map(stream_all, [self._url] * self._parts, parts)
        streams = [stream for part in found for stream in part]
        seconds = time.perf_counter() - began
        wrong = [each for each in streams if each.tokens != tokens]
        assert not wrong, f"{len(wrong)} streams without {tokens} tokens: {wrong[0]}"
        self.reads = sum(each.reads for each in streams)
        return self._clients * tokens / seconds

    def close(self) -> None:
        self._pool.shutdown()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens/s of each round, and the ratio of medians."""
    config = EngineConfig(
        backend=given.device,
        dtype=given.dtype,
        kv_dtype=given.kv_dtype,
        max_batch=given.clients,
        context=given.context,
        warm_up=True,
    )
    options = [] if given.model is None else [given.model]
    options += ["--device", given.device, "--dtype", given.dtype]
    options += ["--kv-dtype", given.kv_dtype, "--context", str(given.context)]
    options += ["--max-batch", str(given.clients), "--no-access-log"]
    if given.frontends is not None:
        options += ["--frontends", given.frontends]
    found: dict[str, list[float]] = {"engine": [], "server": []}
    with (
        InferenceEngine.from_pretrained(given.model, config) as engine,
        server(*options) as (host, port, _),
    ):
        clients = Clients(f"http://{host}:{port}", given.clients, given.processes)
        for round_ in range(given.rounds + 1):
            rates = (
                generate(engine, given.clients, round_, given.tokens),
                clients.rate(round_, given.tokens),
            )
            if round_:  # the first one warms up
                for name, rate in zip(found, rates, strict=True):
                    found[name].append(rate)
                reads = given.clients * given.tokens / clients.reads
                print(
                    "engine {:.1f}, server {:.1f} tokens/s,".format(*rates),
                    f"{reads:.2f} tokens a part",
                    flush=True,
                )
        clients.close()
        device = engine.device
    engine_rate, server_rate = map(statistics.median, found.values())
    return {"device": device, **found, "ratio": server_rate / engine_rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or GGUF file [default model]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--processes", type=int, default=1, help="of the clients")
    parser.add_argument("--frontends", help="of the server; a number or auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    found = measure(given)
    if given.json is not None:
        given.json.write_text(json.dumps({**vars(given), **found}, default=str))
    print(f"server / engine, ratio of medians: {found['ratio']:.3f}")


if __name__ == "__main__":
    main()
