"""Bodies of requests and responses over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from inl.serve.api_error import ApiError
from inl.serve.dialect import parse
from inl.serve.event_stream import Receive, Send, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from inl.serve.job import Answer, Delta

T = TypeVar("T")

SMALL = 32 << 10
"""Bytes of a body that the event loop decodes, in about a millisecond at most."""

THREADS = ThreadPoolExecutor(2, "inl-bodies")
"""Decode large bodies, whose number :class:`~inl.serve.gate.Gate` limits."""


SHORT_ANSWER = 512
"""Tokens and log-probabilities that the event loop writes at once, in about a
millisecond."""

WRITERS = ThreadPoolExecutor(1, "inl-answers")
"""Writes longer answers, one after the other."""


async def written(parts: Sequence[Answer | Delta], write: Callable[[], bytes]) -> bytes:
    """Return what ``write`` makes of parts of an answer.

    For long ones it is called on a thread: those of a client that reads slowly have all
    tokens that were generated meanwhile.
    """
    if sum(map(_values, parts)) <= SHORT_ANSWER:
        return write()
    return await asyncio.get_running_loop().run_in_executor(WRITERS, write)


def _values(part: Answer | Delta) -> int:
    """Return the number of tokens and log-probabilities of a part of an answer."""
    count = len(part.token_ids)
    scores = (
        [part.logprobs]
        if part.prompt is None
        else [part.logprobs, part.prompt.logprobs]
    )
    for each in scores:
        count += sum(1 + len(score.top) for score in each if score is not None)
    return count


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request; raises :class:`ApiError` if it is incomplete."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ApiError(400, "body: the client disconnected before it was complete")
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Return what ``decode`` makes of a body; of a large one it is called on a thread.

    Large bodies have threads of their own, and other requests do not wait for them.
    """
    if len(body) <= SMALL:
        return decode(body)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(THREADS, _decoded, body, decode)


def _decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(body)
    except ApiError as error:
        failure = error
    # Without the frames that hold the values, which this thread frees then.
    failure.__cause__ = failure.__context__ = failure.__traceback__ = None
    try:
        raise failure
    finally:
        del failure, body, decode  # its traceback has this frame


async def parsed(request: Request, schema: type[T]) -> T:
    """Return the fields of a request's body; raises :class:`ApiError`."""
    return await decoded(
        await read_body(request.receive), partial(parse, schema=schema)
    )


async def send_json(
    send: Send, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    """Send a response with a JSON body."""
    await send_encoded(send, status, encode(body), headers)


async def send_encoded(
    send: Send, status: int, data: bytes, headers: dict[str, str] | None = None
) -> None:
    """Send a response with a body that is JSON already."""
    pairs = {"content-type": "application/json", "content-length": str(len(data))}
    lines = [(k.encode(), v.encode()) for k, v in (pairs | (headers or {})).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: ApiError, body: Any) -> None:
    """Send an error response."""
    await send_json(send, error.status, body, error.headers)
