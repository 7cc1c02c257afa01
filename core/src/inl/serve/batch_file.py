"""Runs a file of requests, as OpenAI's batch interface describes it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from inl.bounded_json import parse_json, parse_object
from inl.errors import InvalidJson, RequestError
from inl.file_lock import locked
from inl.serve.api_error import as_api_error

log = logging.getLogger("inl.serve")

App = Callable[[Any, Any, Any], Awaitable[None]]

EMBEDDINGS = "/v1/embeddings"

RESPONSES = "/v1/responses"

FIXED: dict[str, dict[str, Any]] = {
    EMBEDDINGS: {},
    RESPONSES: {"stream": False, "store": False},
}
"""Fields that requests of a path have here, whatever their lines say."""

PATHS = ("/v1/chat/completions", "/v1/completions", RESPONSES, EMBEDDINGS)

MAX_LINE = 64 << 20
"""Bytes of a line."""

BEGINNING = b'{"id": "batch_req_'
"""Of each answer."""

RETRY_SECONDS = 0.1
"""Between attempts of a request for which the queue has no room."""


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file; raises :class:`RequestError` for a bad line."""
    ids: set[str] = set()
    with path.open("rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE + 1), b"")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            request = parse_object(line, where, max_bytes=MAX_LINE)
            custom, url = request.get("custom_id"), request.get("url")
            valid = isinstance(custom, str) and isinstance(request.get("body"), dict)
            if not valid or url not in PATHS or custom in ids:
                raise RequestError(
                    f"{where}: found custom_id {custom!r:.60} and url {url!r:.60}; "
                    "accepts a custom_id that no other line has, an object as body, "
                    f"and {', '.join(PATHS)}"
                )
            ids.add(str(custom))
            yield request


def finished_ids(path: Path) -> set[str]:
    """Return the ids that a file has answers of.

    Drops an incomplete last line, and the lines of failed requests, which are to run
    again. Raises :class:`RequestError`, and leaves the file as it is, if a line is no
    answer.
    """
    if not path.exists():
        return set()
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    torn = lines.pop() if lines and not data.endswith(b"\n") else b""
    answered = [_answered(path, *each) for each in enumerate(lines, 1)]
    if torn[: len(BEGINNING)] != BEGINNING[: len(torn)]:
        _refuse_answer(path, len(lines) + 1, torn)
    good = [
        line for line, (_, failed) in zip(lines, answered, strict=True) if not failed
    ]
    if torn or len(good) < len(lines):
        rest = path.with_name(path.name + ".part")
        rest.write_bytes(b"".join(good))
        rest.replace(path)
    return {custom for custom, failed in answered if not failed}


@contextmanager
def only_run(path: Path) -> Iterator[None]:
    """Hold the lock of a file of answers; raises :class:`RequestError` if a run does.

    The locked file, ``.lock`` beside it, stays: another run may wait to open it.
    """
    try:
        with locked(path.with_name(path.name + ".lock"), wait=False):
            yield
    except BlockingIOError as error:
        raise RequestError(
            f"{path}: another run of run-batch writes it; wait until it ends, or name "
            "another file of answers"
        ) from error


def _answered(path: Path, number: int, line: bytes) -> tuple[str, bool]:
    """Return the id of an answer, and whether its request failed."""
    with suppress(InvalidJson):
        answer = parse_object(line, str(path))
        response, custom = answer.get("response"), answer.get("custom_id")
        if isinstance(response, dict) and isinstance(custom, str):
            return custom, response.get("status_code") != 200
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

    Returns the number of failed ones. output: should escape what cannot be encoded.
    tick: called after each request.
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
    requests: list[dict[str, Any]],
    answered: Callable[[dict[str, Any]], None],
    *,
    concurrency: int,
) -> None:
    """Answer requests; ``answered`` is called with the line of each as it finishes."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            status, number, body = await _answer(app, request["url"], request["body"])
            answer = {"status_code": status, "request_id": number, "body": body}
            line = {"id": f"batch_req_{number}", "custom_id": request["custom_id"]}
            answered(line | {"response": answer, "error": None})

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
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
