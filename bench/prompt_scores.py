"""Log-probabilities of prompts, as lm-eval reads them, beside a plain prefill.

    python bench/prompt_scores.py [MODEL] [--backend cpu] [--requests 200] [--tokens 64]

Times both in turns in one process: through the engine, and through a server of the same
engine by ``--concurrency`` clients. Prints the least seconds of each, wall and
processor, and the median ratio of the turns. ``continuations`` are log-likelihoods of
the last ``--continuation`` tokens of each prompt, as ``lm_eval_engine.py`` and
``lm_eval_server.py`` of examples/python ask for them. ``all tokens`` are those of whole
prompts and one generated token, as lm-eval's own ``local-completions`` asks: a prefill
computes logits of one token of a prompt, this one those of all, and the product with
the vocabulary is most of the difference.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from time import perf_counter, process_time
from typing import Any
from urllib.parse import urlsplit

from random_models import SHAPES, random_language

from inl import EngineConfig, InferenceEngine
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model

Run = Callable[[bool], None]
"""Answers all prompts; whether their log-probabilities are asked for."""
ALL = 0
"""In place of the first token of a continuation: of ``local-completions``."""


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help=f"or {', '.join(SHAPES)}: random")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--continuation", type=int, default=16, help="its last tokens")
    parser.add_argument("--concurrency", type=int, default=32, help="of HTTP clients")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    config = EngineConfig(
        context=given.tokens + 2, prefix_cache=False, max_batch=64,
        backend=given.backend, max_queued_requests=2 * given.requests,
    )  # fmt: skip
    is_random = given.model in SHAPES
    language = (
        random_language(given.model)
        if is_random
        else open_model(resolve_model(given.model))
    )
    with InferenceEngine(language, config=config) as engine:
        draws = random.Random(0)
        vocab = engine.core.runner.limits.vocab
        prompts = [
            [draws.randrange(vocab) for _ in range(given.tokens)]
            for _ in range(given.requests)
        ]
        print(f"{given.requests} prompts of {given.tokens} tokens on {engine.device}")
        kinds = {
            f"continuations of {given.continuation}": given.tokens - given.continuation,
            "all tokens": ALL,
        }
        for name, start in kinds.items():
            run = engine_run(engine, prompts, start)
            compare(f"engine, {name}", run, given.turns)
        if is_random:  # has no tokenizer, which the server needs
            return
        with serving(engine, given) as url:
            for name, start in kinds.items():
                run = http_run(url, prompts, given.concurrency, start)
                compare(f"HTTP, {name}", run, given.turns)


def compare(name: str, run: Run, turns: int) -> None:
    """Time both in turns, and print the least and the median of their ratios."""
    for is_scored in (False, True):  # compiles
        run(is_scored)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(turns):
        order = (False, True) if turn % 2 == 0 else (True, False)
        for is_scored in order:
            wall, used = perf_counter(), process_time()
            run(is_scored)
            times[is_scored].append((perf_counter() - wall, process_time() - used))
    for index, kind in enumerate(("wall", "processor")):
        plain = [each[index] for each in times[False]]
        scored = [each[index] for each in times[True]]
        ratios = [b / a for a, b in zip(plain, scored, strict=True)]
        print(
            f"{name}, {kind}: prefill {min(plain):.2f} s, with scores "
            f"{min(scored):.2f} s, {statistics.median(ratios):.2f} times"
        )


def engine_run(engine: InferenceEngine, prompts: list[list[int]], start: int) -> Run:
    """Return a function that answers prompts through the engine.

    start: the first token with a log-probability, or ``ALL``.
    """

    def run(is_scored: bool) -> None:
        options: Any = {"max_tokens": 1}
        if is_scored:
            options = {"prompt_logprobs": 1, "prompt_logprobs_start": start}
            options["max_tokens"] = 1 if start == ALL else 0
        engine.generate(prompts, **options)

    return run


def http_run(url: str, prompts: list[list[int]], concurrency: int, start: int) -> Run:
    """Return a function that answers prompts through a server.

    start: as of :func:`engine_run`.
    """
    address = urlsplit(url)
    local = threading.local()

    def answer(body: bytes) -> None:
        if not hasattr(local, "client"):
            local.client = HTTPConnection(address.hostname or "", address.port)
        kind = {"content-type": "application/json"}
        local.client.request("POST", "/v1/completions", body, kind)
        found = local.client.getresponse()
        text = found.read()
        if found.status != 200:
            raise SystemExit(f"status {found.status}: {text[:300]!r}")

    pool = ThreadPoolExecutor(concurrency)

    def run(is_scored: bool) -> None:
        asked: dict[str, Any] = {"max_tokens": 1, "temperature": 0}
        if is_scored:
            asked |= {"echo": True, "logprobs": 1}
        if is_scored and start != ALL:
            asked |= {"max_tokens": 0, "prompt_logprobs_start": start}
        bodies = [json.dumps({"prompt": ids, **asked}).encode() for ids in prompts]
        list(pool.map(answer, bodies))

    return run


@contextmanager
def serving(engine: InferenceEngine, given: argparse.Namespace) -> Iterator[str]:
    """Serve an engine on a free port of this machine, by a thread."""
    import asyncio

    from inl.serve.model_slot import ModelSource
    from inl.serve.server import Server
    from inl.serve.settings import ServerConfig

    settings = ServerConfig(port=0, max_queue=2 * given.requests)
    ready = threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = Server(
            [ModelSource("model", lambda _: engine)], settings, max_batch=64
        )

        def started(url: str) -> None:
            found.extend((url, loop, server))
            ready.set()

        await server.serve(started)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    url, loop, server = found
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join()


if __name__ == "__main__":
    main()
