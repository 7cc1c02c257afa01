"""Streams of events, and the connection that they are sent over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class StreamFormat(NamedTuple):
    """How a dialect streams. idle: what is sent after a time without a delta."""

    media_type: bytes
    idle: bytes


EVENTS = StreamFormat(b"text/event-stream; charset=utf-8", b": keep-alive\n\n")
"""Server-sent events, with a comment that clients ignore."""

HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # reverse proxies must not hold events back
]


def event(body: Any, name: str | None = None) -> bytes:
    """Return one server-sent event with a JSON body."""
    data = b"data: " + encode(body) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


class Disconnected(Exception):
    """The client has closed the connection."""


@asynccontextmanager
async def disconnect_cancels(receive: Receive) -> AsyncIterator[None]:
    """Raise :class:`Disconnected` in the body when the client disconnects.

    The request's body has been read.
    """
    task = asyncio.current_task()
    assert task is not None, "called by a task"
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            """Nothing follows the body but the disconnection."""
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise Disconnected from None
        raise
    finally:
        watcher.cancel()


async def start_stream(send: Send, media_type: bytes) -> None:
    """Send the status and headers of a stream."""
    start = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": [(b"content-type", media_type), *HEADERS]})


async def send_part(send: Send, body: bytes) -> None:
    """Send a part of a stream; waits while the client reads too slowly."""
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def end_stream(send: Send, body: bytes) -> None:
    """Send the last part of a stream and its end together."""
    await send({"type": "http.response.body", "body": body, "more_body": False})
