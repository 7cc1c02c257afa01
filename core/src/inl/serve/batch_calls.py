"""Answers the requests of a batch file by calls of the application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
)
from typing import IO, Any, NamedTuple

import msgspec

from inl.serve.api_error import as_api_error
from inl.serve.batch_file import BEGINNING, body_of
from inl.serve.event_stream import encode

log = logging.getLogger("inl.serve")

App = Callable[[Any, Any, Any], Awaitable[None]]

RETRY_SECONDS = 0.1
"""Between attempts of a request for which the queue has no room."""


async def run_batch(
    app: App,
    requests: AsyncIterator[dict[str, Any]],
    output: IO[str],
    *,
    concurrency: Callable[[], int],
    tick: Callable[[], None],
) -> int:
    """Answer requests and write a line for each as it finishes.

    Returns the number of failed ones. output: should escape what cannot be encoded.
    concurrency: returns how many requests may be open now, of a fleet as many as its
    engines have room for; no more are read than are open. tick: called after each
    request.
    """
    failed = 0
    tasks: set[asyncio.Task[None]] = set()
    ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    async def work(request: dict[str, Any]) -> None:
        nonlocal failed
        answer = await answer_of(app, request["url"], body_of(request))
        failed += answer.status != 200
        output.write(answer.line(request["custom_id"]).decode())
        output.flush()
        tick()

    async def one_ends() -> None:
        task = await ended.get()
        tasks.discard(task)
        task.result()  # raises what writing has

    try:
        async for request in requests:
            while len(tasks) >= max(concurrency(), 1):
                await one_ends()
            task = asyncio.create_task(work(request))
            tasks.add(task)
            task.add_done_callback(ended.put_nowait)
        while tasks:
            await one_ends()
    finally:
        await end_tasks(tasks)
    return failed


async def at_once(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    """Run a coroutine several times at once; the first error ends the others.

    All have ended when this returns.
    """
    tasks = [asyncio.create_task(work()) for _ in range(count)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks that are not done, and wait for them."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


class FileAnswer(NamedTuple):
    """The answer of a request of a file. body: JSON."""

    status: int
    number: str
    body: bytes

    def line(self, custom_id: str) -> bytes:
        """Return the line of the answer, for the request of an id."""
        # Not decoded: it may be large. A line break in JSON is a blank.
        body = self.body.replace(b"\n", b" ")
        return b'%s%s", "custom_id": %s, "response": {"status_code": %d, %s}%s\n' % (
            BEGINNING,
            self.number.encode(),
            json.dumps(custom_id, ensure_ascii=False).encode(),
            self.status,
            b'"request_id": "%s", "body": %s' % (self.number.encode(), body),
            b', "error": null}',
        )


async def answer_of(app: App, path: str, body: bytes) -> FileAnswer:
    """Return the answer of a request; waits while the queue is full."""
    while True:
        status, headers, answer = await _call(app, path, body)
        if b"retry-after" not in headers:
            return FileAnswer(
                status, headers.get(b"x-request-id", b"").decode(), answer
            )
        await asyncio.sleep(RETRY_SECONDS)


async def _call(
    app: App, path: str, data: bytes
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Call the application without a connection."""
    messages = [{"type": "http.request", "body": data}]
    status, answered, parts = 500, dict[bytes, bytes](), list[bytes]()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # never disconnects
        raise AssertionError("unreachable")

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        answered.update(message.get("headers", ()))
        parts.append(message.get("body", b""))

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    try:
        await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
        body = b"".join(parts)
        msgspec.json.decode(body, type=msgspec.Raw)  # checks what a line is made of
        return status, answered, body
    except Exception as error:  # of one request: the others go on
        log.exception("a request of %s failed", path)
        return 500, {}, encode(as_api_error(error).openai())
