"""An engine on hashes that serves front-ends: ``python hash_engine_process.py JSON``.

With ``is_real`` it is the default model on the CPU, or that of ``model``; ``digest`` is
that of its weights.
Writes its address to the standard output. It ends when its standard input is closed.
With the number of a socket in place of JSON, it is one that
:class:`~inl.fleet.local_engines.LocalEngines` starts, with ``--connect`` one of
:class:`~inl.fleet.placed_engines.PlacedEngines`.
SIGUSR1 lets steps wait after the next ``STEPS``, which it says; SIGUSR2 ends this.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from dataclasses import replace

from http_servers import hash_engine
from inl.config import EngineConfig
from inl.engine.inference_engine import InferenceEngine
from inl.fleet.engine_port import EnginePort
from inl.fleet.local_engines import read_settings, report_served, until_parent_ends
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig
from inl.serve.signals import handle_signals
from inl.workers.placed_engine import Parent
from inl.workers.settings import read_secret

STEPS = 12
"""Steps that may end before others wait."""


def main() -> None:
    listening = joined = None
    secret = read_secret(os.environ)
    if sys.argv[1] == "--connect":
        joined = Parent(os.environ)
        given, listening = joined.settings, joined.listening
        secret = bytes.fromhex(given["secret"])
    elif sys.argv[1].isdigit():
        listening, given = socket.socket(fileno=int(sys.argv[1])), read_settings()
    else:
        given = json.loads(sys.argv[1])
    max_batch = given.get("max_batch", 4)
    server_config = ServerConfig(**given.get("server", {}))

    def open_engine(on_step):
        config = engine_config(
            EngineConfig(**given.get("config", {})), server_config, max_batch
        )
        if given.get("is_real"):
            return InferenceEngine.from_pretrained(
                given.get("model"), config, on_step=on_step
            )
        engine = hash_engine(
            max_batch,
            seconds=given.get("seconds", 0.0),
            config=config,
            on_step=on_step,
        )
        if digest := given.get("digest"):
            scheduler = engine.core.scheduler
            scheduler.config = replace(scheduler.config, model_digest=digest)
        gates.append(engine.runner.gate)
        return engine

    gates = []

    def hold():
        gates[-1].hold_after(STEPS)
        print("held", flush=True)

    async def serve():
        adapters, place = given.get("adapters", {}), given.get("model")
        source = ModelSource("hash", open_engine, adapters, place)
        server = Server([source], server_config, max_batch=max_batch)
        address = given.get("address", "127.0.0.1:0")
        server.port = EnginePort(server, address, secret, listening)
        handle_signals(server.stop)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, hold)
        loop.add_signal_handler(signal.SIGUSR2, lambda: gates[-1].release())

        def started(address):
            if listening is None:
                print(address, flush=True)
            elif joined is None:
                report_served()

        serving = asyncio.create_task(server.serve(started))
        ending = joined.until_ended(server.stop) if joined else until_parent_ends()
        parent = asyncio.ensure_future(ending)
        await asyncio.wait([serving, parent], return_when="FIRST_COMPLETED")
        parent.cancel()
        serving.cancel()
        await asyncio.gather(serving, parent, return_exceptions=True)
        server.close()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
