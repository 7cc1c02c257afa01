"""A front-end process: ``python -m inl.serve.frontends.main --link FD --listen FD``.

Accepts connections and runs the dialects; the engine's process generates. SIGTERM and
SIGINT are left to that process, whose end ends this one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.serve.api_error import ApiError, as_api_error
from inl.serve.app import GENERATING, error_shape, generate_endpoint
from inl.serve.frontends.client import EngineClient
from inl.serve.frontends.forwarding import Forwarder
from inl.serve.frontends.messages import Ready
from inl.serve.frontends.remote import RemoteModels, RemoteResponses
from inl.serve.gate import Gate
from inl.serve.http_messages import send_error
from inl.serve.http_server import HttpServer, loop_factory

if TYPE_CHECKING:
    from inl.serve.event_stream import Receive, Send
    from inl.serve.frontends.remote import Client
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")


def make_frontend_app(
    models: RemoteModels, client: Client, config: ServerConfig
) -> Gate:
    """Return the ASGI application of a front-end."""
    store = RemoteResponses(client) if config.stored_responses else None
    endpoints = {
        path: generate_endpoint(path, make, models, config, store)
        for path, make in GENERATING.items()
    }
    forward = Forwarder(client)

    async def app(scope: Any, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get(scope["path"])
        if endpoint is not None and scope["method"] == "POST":
            await endpoint(scope, receive, send)
            return
        await forward(scope, receive, send)

    async def guarded(scope: Any, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            failure = as_api_error(error)
            if failure.status == 500:
                log.exception("%s failed", scope["path"])
            await send_error(send, failure, error_shape(scope["path"], failure))

    async def check_room(path: str, client_name: str) -> None:
        if path in GENERATING:
            await client.check_room(client_name)

    return Gate(guarded, config, error_shape, check_room)


async def serve(end: socket.socket, listening: socket.socket) -> None:
    """Serve until the engine's process says so or ends."""
    server: HttpServer | None = None

    def drain(force: bool) -> None:
        if server is not None:
            server.stop(force=force)

    client = EngineClient(drain)
    await client.connect(end)
    try:
        settings = await client.settings
    except ApiError:  # the engine's process has ended
        return
    logging.getLogger("inl.serve.access").disabled = not settings.has_access_log
    models = RemoteModels(settings.models, client)
    if len(models.all) == 1:
        await models.default.opened()
    app = make_frontend_app(models, client, settings.server)
    if not client.is_connected:
        return
    server = HttpServer(app, settings.server)
    gc.collect()
    gc.freeze()
    await server.serve(listening, partial(client.send, Ready()))
    client.close()


def main() -> None:
    """Run a front-end."""
    parser = argparse.ArgumentParser(description="Run a front-end of inl serve.")
    parser.add_argument("--link", type=int, required=True)
    parser.add_argument("--listen", type=int, required=True)
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("inl: %(message)s"))
    logging.getLogger("inl").addHandler(handler)
    logging.getLogger("inl").setLevel(logging.INFO)
    end, listening = (
        socket.socket(fileno=given.link),
        socket.socket(fileno=given.listen),
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(end, listening))


if __name__ == "__main__":
    main()
