"""Runs a file of requests, as OpenAI's batch interface describes it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import msgspec

from inl.bounded_json import parse_object
from inl.errors import RequestError
from inl.file_lock import locked
from inl.serve.api_error import as_api_error
from inl.serve.event_stream import encode

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


class _Response(msgspec.Struct):
    status_code: int


class _AnswerLine(msgspec.Struct):
    """What is read of an answer; its body may be of any size."""

    custom_id: str
    response: _Response


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file; raises :class:`RequestError` for a bad line."""
    for _, request in numbered_requests(path):
        yield request


def numbered_requests(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the requests of a file, each with the place where its line begins."""
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
            yield file.tell() - len(line), request


def body_of(request: dict[str, Any]) -> bytes:
    """Return the body of a request, as its endpoint reads it."""
    fixed = FIXED.get(request["url"], {"stream": False})
    return json.dumps({**request["body"], **fixed}).encode()


def finished_ids(path: Path) -> set[str]:
    """Return the ids that a file has answers of.

    Drops an incomplete last line, and the lines of failed requests, which are to run
    again. Raises :class:`RequestError`, and leaves the file as it is, if a line is no
    answer.
    """
    if not path.exists():
        return set()
    finished, has_others = set[str](), False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                    _refuse_answer(path, number, line)
                has_others = True
                break
            custom, failed = answered_line(line, path, number)
            has_others |= failed
            if not failed:
                finished.add(custom)
    if has_others:
        _drop_others(path)
    return finished


def _drop_others(path: Path) -> None:
    """Keep the lines of requests that have succeeded."""
    rest = path.with_name(path.name + ".part")
    with path.open("rb") as file, rest.open("wb") as kept:
        for line in file:
            if line.endswith(b"\n") and not answered_line(line, path)[1]:
                kept.write(line)
    rest.replace(path)


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


def answered_line(line: bytes, path: Path, number: int = 0) -> tuple[str, bool]:
    """Return the id of an answer, and whether its request failed.

    Raises :class:`RequestError`, which names ``path`` and ``number``, for another line.
    """
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        answer = msgspec.json.decode(line, type=_AnswerLine)
        return answer.custom_id, answer.response.status_code != 200
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
    waiting = iter(requests)

    async def work() -> None:
        nonlocal failed
        for request in waiting:
            answer = await answer_of(app, request["url"], body_of(request))
            failed += answer.status != 200
            output.write(answer.line(request["custom_id"]).decode())
            output.flush()
            tick()

    await at_once(work, concurrency)
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
