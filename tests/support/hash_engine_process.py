"""An engine on hashes that serves front-ends: ``python hash_engine_process.py JSON``.

Writes its address to the standard output. It ends when its standard input is closed.
With the number of a socket in place of JSON, it is one that
:class:`~inl.fleet.local_engines.LocalEngines` starts, with ``--connect`` one of
:class:`~inl.fleet.placed_engines.PlacedEngines`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

from http_servers import hash_engine
from inl.config import EngineConfig
from inl.fleet.engine_port import EnginePort
from inl.fleet.local_engines import read_settings, report_served, until_parent_ends
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig
from inl.serve.signals import handle_signals
from inl.workers.placed_engine import Parent
from inl.workers.settings import read_secret


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
        return hash_engine(
            max_batch,
            seconds=given.get("seconds", 0.0),
            config=config,
            on_step=on_step,
        )

    async def serve():
        server = Server(
            [ModelSource("hash", open_engine)], server_config, max_batch=max_batch
        )
        address = given.get("address", "127.0.0.1:0")
        server.port = EnginePort(server, address, secret, listening)
        handle_signals(server.stop)

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
