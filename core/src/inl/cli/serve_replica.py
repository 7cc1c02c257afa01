"""An engine that ``inl serve --replicas`` starts: ``python -m ... FD | --connect``.

FD is an inherited socket on which it listens. ``--connect`` joins the server as workers
do, see :mod:`inl.workers.handshake`, and listens on the host that this reaches it from.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from inl.cli.serve_models import make_server
from inl.config import EngineConfig
from inl.fleet.engine_port import EnginePort
from inl.fleet.local_engines import read_settings, report_served, until_parent_ends
from inl.serve.http_server import loop_factory, raise_open_files
from inl.serve.settings import ServerConfig
from inl.serve.signals import handle_signals
from inl.workers.placed_engine import Parent
from inl.workers.settings import DEVICE, SECRET, SECRET_FILE, read_secret, show_address

UntilParentEnds = Callable[[Callable[[], None]], Awaitable[None]]
"""Called with what lets the engine finish its requests and end; returns once the
parent has ended."""


def main() -> None:
    """Serve front-ends until the parent ends."""
    settings = dict(os.environ)
    for name in (SECRET, SECRET_FILE):  # not for processes that libraries start
        os.environ.pop(name, None)
    if sys.argv[1] == "--connect":
        parent = Parent(settings)
        given = parent.settings
        if DEVICE in settings:
            given["engine"]["backend"] = settings[DEVICE]
        secret = bytes.fromhex(given["secret"])
        _serve(given, secret, parent.listening, lambda _: None, parent.until_ended)
        return
    given = read_settings()
    secret = read_secret(settings) or b""
    listening = socket.socket(fileno=int(sys.argv[1]))
    _serve(given, secret, listening, lambda _: report_served(), _until_closed)


async def _until_closed(stop: Callable[[], None]) -> None:  # noqa: ARG001 - by signals
    await until_parent_ends()


def _serve(
    given: Mapping[str, Any],
    secret: bytes,
    listening: socket.socket,
    started: Callable[[str], None],
    until_ended: UntilParentEnds,
) -> None:
    """Load the model and serve front-ends."""
    config, engine = ServerConfig(**given["server"]), EngineConfig(**given["engine"])
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
            serving = asyncio.create_task(server.serve(started))
            parent = asyncio.ensure_future(until_ended(server.stop))
            await asyncio.wait([serving, parent], return_when="FIRST_COMPLETED")
            parent.cancel()
            if not serving.done():
                serving.cancel()
            await asyncio.gather(serving, parent, return_exceptions=True)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())


if __name__ == "__main__":
    main()
