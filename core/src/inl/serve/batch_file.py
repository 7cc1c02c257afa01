"""Runs a file of requests, as OpenAI's batch interface describes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any

from inl.errors import RequestError

App = Callable[[Any, Any, Any], Awaitable[None]]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file; raises :class:`RequestError` for a bad line."""
    ids: set[str] = set()
    with path.open(encoding="utf-8") as file:
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
    """Return the ids that a file has answers of, and drop an incomplete last line."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    return {json.loads(line)["custom_id"] for line in complete.splitlines()}


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
            status, body = await _call(app, request["url"], request["body"])
            failed += status != 200
            answer = {"status_code": status, "body": body}
            line = {"custom_id": request["custom_id"], "response": answer}
            output.write(json.dumps({**line, "error": None}, ensure_ascii=False) + "\n")
            output.flush()
            tick()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return failed


async def _call(app: App, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Call the application without a connection."""
    data = json.dumps({**body, "stream": False}).encode()
    messages = [{"type": "http.request", "body": data}]
    status, parts = 500, list[bytes]()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # never disconnects
        raise AssertionError("unreachable")

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await app({**scope, "query_string": b"", "root_path": ""}, receive, send)
    return status, json.loads(b"".join(parts))
