"""Runs a file of requests, as OpenAI's batch interface describes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from inl.errors import RequestError

App = Callable[[Any, Any, Any], Awaitable[None]]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


BEGINNING = b'{"id": "batch_req_'
"""Of each answer."""

RETRY_SECONDS = 0.1
"""Between attempts of a request for which the queue has no room."""


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file; raises :class:`RequestError` for a bad line."""
    ids: set[str] = set()
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = json.loads(line)
                custom, url = request["custom_id"], request["url"]
                valid = isinstance(custom, str) and isinstance(request["body"], dict)
            except (ValueError, KeyError, TypeError) as error:
                raise RequestError(
                    f"{path}, line {number}: {error!r}; accepts an object with "
                    "custom_id, method, url and body"
                ) from error
            if not valid or url not in PATHS or custom in ids:
                raise RequestError(
                    f"{path}, line {number}: found custom_id {custom!r:.60} and url "
                    f"{url!r:.60}; accepts a custom_id that no other line has, an "
                    f"object as body, and {', '.join(PATHS)}"
                )
            ids.add(custom)
            yield request


def finished_ids(path: Path) -> set[str]:
    """Return the ids that a file has answers of, and drop an incomplete last line.

    Raises :class:`RequestError`, and leaves the file as it is, if a line is no answer.
    """
    if not path.exists():
        return set()
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    ids = {
        _answered_id(path, number, line)
        for number, line in enumerate(complete.splitlines(), 1)
    }
    if len(complete) < len(data):
        torn = data[len(complete) :]
        if torn[: len(BEGINNING)] != BEGINNING[: len(torn)]:
            _refuse_answer(path, len(ids) + 1, torn)
        with path.open("r+b") as file:
            file.truncate(len(complete))
    return ids


def _answered_id(path: Path, number: int, line: bytes) -> str:
    try:
        answer = json.loads(line)
        if isinstance(answer["response"], dict):
            return str(answer["custom_id"])
    except (ValueError, KeyError, TypeError):
        """Refused below."""
    return _refuse_answer(path, number, line)


def _refuse_answer(path: Path, number: int, line: bytes) -> NoReturn:
    raise RequestError(
        f"{path}, line {number}: found {line[:60]!r}, which is no answer of run-batch; "
        "accepts a new file, or the answers of an earlier run"
    )


async def run_batch(
    app: App,
    requests: list[dict[str, Any]],
    output: IO[str],
    *,
    concurrency: int,
    tick: Callable[[], None],
) -> int:
    """Answer requests and write a line for each as it finishes.

    Returns the number of failed ones. tick: called after each request.
    """
    waiting = iter(requests)
    failed = 0

    async def work() -> None:
        nonlocal failed
        for request in waiting:
            status, number, body = await _answer(app, request["url"], request["body"])
            failed += status != 200
            answer = {"status_code": status, "request_id": number, "body": body}
            line = {"id": f"batch_req_{number}", "custom_id": request["custom_id"]}
            line |= {"response": answer, "error": None}
            output.write(json.dumps(line, ensure_ascii=False) + "\n")
            output.flush()
            tick()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return failed


async def _answer(app: App, path: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    """Return status, number and body of an answer; waits while the queue is full."""
    data = json.dumps({**body, "stream": False}).encode()
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
    await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    return status, answered, json.loads(b"".join(parts))
