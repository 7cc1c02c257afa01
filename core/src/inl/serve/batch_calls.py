"""Answers the requests of a batch file by calls of the application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO, Any

from inl.bounded_json import parse_json
from inl.serve.api_error import as_api_error
from inl.serve.batch_file import FIXED

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
    concurrency: see :func:`answer_all`. tick: called after each request.
    """
    failed = 0

    def write(answer: dict[str, Any]) -> None:
        nonlocal failed
        failed += answer["response"]["status_code"] != 200
        output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        output.flush()
        tick()

    await answer_all(app, requests, write, concurrency=concurrency)
    return failed


async def answer_all(
    app: App,
    requests: AsyncIterator[dict[str, Any]],
    answered: Callable[[dict[str, Any]], None],
    *,
    concurrency: Callable[[], int],
) -> None:
    """Answer requests; ``answered`` is called with the line of each as it finishes.

    concurrency: returns how many requests may be open now, of a fleet as many as its
    engines have room for. No more are read than are open.
    """
    tasks: set[asyncio.Task[None]] = set()
    ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    async def work(request: dict[str, Any]) -> None:
        status, number, body = await _answer(app, request["url"], request["body"])
        answer = {"status_code": status, "request_id": number, "body": body}
        line = {"id": f"batch_req_{number}", "custom_id": request["custom_id"]}
        answered(line | {"response": answer, "error": None})

    async def one_ends() -> None:
        task = await ended.get()
        tasks.discard(task)
        task.result()  # raises what ``answered`` has

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
        for task in tasks:
            task.cancel()


async def _answer(app: App, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Return status, number and body of an answer; waits while the queue is full."""
    data = json.dumps({**body, **FIXED.get(path, {"stream": False})}).encode()
    while True:
        status, headers, answer = await _call(app, path, data)
        if b"retry-after" not in headers:
            return status, headers.get(b"x-request-id", b"").decode(), answer
        await asyncio.sleep(RETRY_SECONDS)


async def _call(
    app: App, path: str, data: bytes
) -> tuple[int, dict[bytes, bytes], Any]:
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
        return status, answered, parse_json(b"".join(parts), path)
    except Exception as error:  # of one request: the others go on
        log.exception("a request of %s failed", path)
        return 500, {}, as_api_error(error).openai()
