"""An engine that ``inl serve --replicas`` starts: ``python -m ... FD``."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

from inl.cli.serve_models import make_server
from inl.config import EngineConfig
from inl.fleet.engine_port import EnginePort
from inl.fleet.local_engines import read_settings, report_served, until_parent_ends
from inl.serve.http_server import loop_factory, raise_open_files
from inl.serve.settings import ServerConfig
from inl.serve.signals import handle_signals
from inl.workers.settings import SECRET, read_secret, show_address


def main() -> None:
    """Serve front-ends on an inherited socket until the parent ends."""
    given = read_settings()
    config, engine = ServerConfig(**given["server"]), EngineConfig(**given["engine"])
    secret = read_secret(os.environ)
    os.environ.pop(SECRET, None)  # not for processes that libraries start
    listening = socket.socket(fileno=int(sys.argv[1]))
    address = show_address(*listening.getsockname()[:2])
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"inl: {address}: %(message)s"))
    logging.getLogger("inl").addHandler(handler)
    logging.getLogger("inl").setLevel(logging.INFO)
    raise_open_files()
    with make_server(given["models"], config, engine) as server:
        server.port = EnginePort(server, address, secret, listening)

        async def serve() -> None:
            handle_signals(server.stop)
            serving = asyncio.create_task(server.serve(lambda _: report_served()))
            parent = asyncio.create_task(until_parent_ends())
            await asyncio.wait([serving, parent], return_when="FIRST_COMPLETED")
            parent.cancel()
            if not serving.done():
                serving.cancel()
            await asyncio.gather(serving, parent, return_exceptions=True)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())


if __name__ == "__main__":
    main()
