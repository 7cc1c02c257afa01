"""Streaming clients of a server with random weights, relative to its own engine.

    python bench/serve_shape.py --model MODEL.gguf --device cuda:0 --shape 8b

The shape has the vocabulary, tokenizer and chat template of a file, the default model's
unless ``--model`` names one. One process has the engine and its server; clients have
processes of their own. Each round measures ``engine.generate`` in the server's process,
then as many streams over HTTP, each time with new prompts; the other one is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import threading
from multiprocessing.connection import Connection
from typing import Any

from random_models import SHAPES, random_language
from serve_overhead import Clients, generate

from inl.checkpoints.hub.resolve import resolve_model
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.executor.model_loader import LanguageModel, open_model
from inl.serve.http_server import loop_factory
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig

START_SECONDS = 300.0


def spoken(shape: str, path: str | None, context: int) -> LanguageModel:
    """Return a shape of random weights with the tokenizer of a file."""
    file = open_model(resolve_model(path))
    SHAPES[shape] = (file.config.vocab_size, *SHAPES[shape][1:])
    language = random_language(shape, context)
    checkpoint: Any = language.checkpoint
    checkpoint.tokenizer = file.checkpoint.tokenizer
    checkpoint.chat_template = file.checkpoint.chat_template
    return language


def serve(pipe: Connection, given: argparse.Namespace) -> None:
    """Serve one engine, and generate with it when the pipe asks for a round."""
    logging.getLogger("inl.serve.access").disabled = True
    config = ServerConfig(port=0, max_queue=given.clients, frontends=given.frontends)
    made = EngineConfig(
        backend=given.device, context=given.context, check_weights=False, warm_up=True,
        cache_bytes=given.cache_bytes, kv_host=given.kv_host,
    )  # fmt: skip
    engines: list[InferenceEngine] = []

    def opened(on_step: Any) -> InferenceEngine:
        language = spoken(given.shape, given.model, given.context)
        settings = engine_config(made, config, given.clients)
        engines.append(InferenceEngine(language, config=settings, on_step=on_step))
        return engines[0]

    def rounds() -> None:
        while True:
            number = pipe.recv()
            pipe.send(generate(engines[0], given.clients, number, given.tokens))

    async def run() -> None:
        source = ModelSource("random", opened, place=given.model)
        server = Server([source], config, max_batch=given.clients)
        await server.serve(pipe.send)

    threading.Thread(target=rounds, daemon=True).start()
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


def measure(pipe: Connection, given: argparse.Namespace) -> None:
    """Print the tokens/s of each round, and the ratio of medians."""
    if not pipe.poll(START_SECONDS):
        raise RuntimeError(f"the server has not started in {START_SECONDS:g} s")
    url = pipe.recv()
    if not url.startswith("http"):
        raise RuntimeError(f"the server has not started: {url}")
    clients = Clients(url, given.clients, given.processes)
    found: dict[str, list[float]] = {"engine": [], "server": []}
    for number in range(given.rounds + 1):
        pipe.send(2 * number)
        engine = pipe.recv()
        server = clients.rate(2 * number + 1, given.tokens)
        if number:  # the first one warms up
            found["engine"].append(engine)
            found["server"].append(server)
            print(f"engine {engine:,.0f}, server {server:,.0f} tokens/s", flush=True)
    clients.close()
    engine, server = map(statistics.median, found.values())
    ratio = server / engine
    print(f"server / engine, ratio of medians: {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file of the tokenizer [default model]")
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--processes", type=int, default=4, help="of the clients")
    parser.add_argument("--frontends", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cache-bytes", type=int)
    parser.add_argument("--kv-host", help="as of EngineConfig, such as 0")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=serve, args=(far, given))
    process.start()
    far.close()
    try:
        measure(near, given)
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
