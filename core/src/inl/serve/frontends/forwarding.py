"""HTTP requests that a front-end passes on to the engine's process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from inl.serve.frontends.messages import Forward, Forwarded
from inl.serve.http_messages import read_body
from inl.serve.request_log import Record

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from inl.serve.event_stream import Receive, Send
    from inl.serve.frontends.remote import Client


class Forwarder:
    """ASGI application of a front-end: the engine's process answers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Pass on one request, and its whole response."""
        number = self._client.numbers(1)
        message = Forward(
            number,
            scope["method"],
            scope["path"],
            scope["query_string"],
            scope["headers"],
            await read_body(receive),
            scope["state"]["client"],
        )
        found: Forwarded = await self._client.call(number, message)
        start = {"type": "http.response.start", "status": found.status}
        await send({**start, "headers": found.headers})
        await send({"type": "http.response.body", "body": found.body})


async def answer(app: ASGIApp, message: Forward) -> Forwarded:
    """Return the response of an application of this process."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": message.method,
        "scheme": "http",
        "path": message.path,
        "raw_path": message.path.encode(),
        "query_string": message.query,
        "root_path": "",
        "headers": message.headers,
        "state": {
            "client": message.client,
            "record": Record(str(message.number), message.method, message.path),
        },
    }
    status, headers, parts = 500, [], []

    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # a disconnect is not reported here
        is_read = True
        return {"type": "http.request", "body": message.body, "more_body": False}

    async def send(part: Any) -> None:
        nonlocal status, headers
        if part["type"] == "http.response.start":
            status, headers = part["status"], list(part["headers"])
        else:
            parts.append(part.get("body", b""))

    with suppress(Exception):  # Starlette raises what it has answered with 500
        await app(scope, receive, send)
    return Forwarded(message.number, status, headers, b"".join(parts))
