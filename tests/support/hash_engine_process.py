"""An engine on hashes that serves front-ends: ``python hash_engine_process.py JSON``.

With ``is_real`` it is the default model on the CPU; ``digest`` is that of its weights.
Writes its address to the standard output. It ends when its standard input is closed.
With the number of a socket in place of JSON, it is one that
:class:`~inl.fleet.local_engines.LocalEngines` starts.
"""

from __future__ import annotations

import asyncio
import json
import os
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
from inl.workers.settings import read_secret


def main() -> None:
    listening = None
    if sys.argv[1].isdigit():
        listening = socket.socket(fileno=int(sys.argv[1]))
    given = json.loads(sys.argv[1]) if listening is None else read_settings()
    max_batch = given.get("max_batch", 4)
    server_config = ServerConfig(**given.get("server", {}))

    def open_engine(on_step):
        config = engine_config(
            EngineConfig(**given.get("config", {})), server_config, max_batch
        )
        if given.get("is_real"):
            return InferenceEngine.from_pretrained(None, config, on_step=on_step)
        engine = hash_engine(
            max_batch,
            seconds=given.get("seconds", 0.0),
            config=config,
            on_step=on_step,
        )
        if digest := given.get("digest"):
            scheduler = engine.core.scheduler
            scheduler.config = replace(scheduler.config, model_digest=digest)
        return engine

    async def serve():
        server = Server(
            [ModelSource("hash", open_engine)], server_config, max_batch=max_batch
        )
        address = given.get("address", "127.0.0.1:0")
        server.port = EnginePort(server, address, read_secret(os.environ), listening)
        handle_signals(server.stop)

        def started(address):
            if listening is None:
                print(address, flush=True)
            else:
                report_served()

        serving = asyncio.create_task(server.serve(started))
        parent = asyncio.create_task(until_parent_ends())
        await asyncio.wait([serving, parent], return_when="FIRST_COMPLETED")
        parent.cancel()
        serving.cancel()
        await asyncio.gather(serving, parent, return_exceptions=True)
        server.close()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
