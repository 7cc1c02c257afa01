"""Tokens/s of streaming clients relative to ``engine.generate``, in one run.

    python bench/serve_overhead.py --clients 32 --rounds 5

Each round generates with an engine in this process, then with a server process of its
own; the other one is idle. The clients run in this process, on the same processors.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

from serve_processes import server

from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.serve.load_client import LoadClient, run_load

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


def serve(client: LoadClient, clients: int, round_: int, tokens: int) -> float:
    """Return the tokens/s of streaming clients."""
    options = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"messages": each, **options} for each in messages(clients, round_)]
    began = time.perf_counter()
    samples = asyncio.run(
        run_load(client, bodies, [0.0] * clients, clients, lambda: None)
    )
    seconds = time.perf_counter() - began
    assert all(each.status == 200 and not each.error for each in samples), samples
    return sum(each.completion_tokens for each in samples) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    config = EngineConfig(
        backend="cpu", max_batch=given.clients, context=2048, warm_up=True
    )
    found: dict[str, list[float]] = {"engine": [], "server": []}
    with (
        InferenceEngine.from_pretrained(None, config) as engine,
        server("--max-batch", str(given.clients), "--context", "2048") as place,
    ):
        client = LoadClient(f"http://{place[0]}:{place[1]}")
        for round_ in range(given.rounds + 1):
            rates = (
                generate(engine, given.clients, round_, given.tokens),
                serve(client, given.clients, round_, given.tokens),
            )
            if round_:  # the first one warms up
                for name, rate in zip(found, rates, strict=True):
                    found[name].append(rate)
                print("engine {:.1f}, server {:.1f} tokens/s".format(*rates))
    engine_rate, server_rate = map(statistics.median, found.values())
    print(f"server / engine, ratio of medians: {server_rate / engine_rate:.3f}")


if __name__ == "__main__":
    main()
