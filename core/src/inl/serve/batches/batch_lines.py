"""Lines of a batch: its requests, its answers, and what is stored of them.

For threads: a file may have 50,000 lines and many megabytes, of which one line at a
time is in memory.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from inl.bounded_json import parse_object
from inl.serve.batch_file import (
    answered_line,
    body_of,
    find_answers,
    index_requests,
    placed_requests,
    read_requests,
)
from inl.serve.batches.file_store import private

MAX_REQUESTS = 50_000
"""Requests of a batch, as OpenAI's limit."""

MAX_ERRORS = 100
"""Errors of a batch that is refused."""

MAX_SHOWN = 64
"""Characters of an id of a client that an error has."""


class Plan(NamedTuple):
    """What is to be answered of a batch."""

    total: int
    finished: int
    """Requests that have an answer."""
    starts: array[int]
    """Where the lines of the others begin."""
    errors: list[dict[str, Any]]
    """Why the batch is refused; none accepts it."""


class Results(NamedTuple):
    """Lines and bytes of the two files of a batch that has ended."""

    good: int
    bad: int
    good_bytes: int
    bad_bytes: int


def plan(requests: Path, answers: Path, endpoint: str) -> Plan:
    """Check the requests of a batch, and find those that have no answer.

    Drops the answers of requests that failed, which are asked again. Raises OSError and
    :class:`~inl.errors.RequestError`.
    """
    ids = index_requests(requests)
    find_answers(answers, ids)
    total, starts, errors = len(ids), array("Q"), list[dict[str, Any]]()
    for start, request in islice(placed_requests(requests), MAX_REQUESTS):
        custom, url = request["custom_id"], request["url"]
        if url != endpoint and len(errors) < MAX_ERRORS:
            text = f"url {url!r}, accepts {endpoint!r}"
            errors.append(batch_error("mismatched_url", text, custom[:MAX_SHOWN]))
        if not ids.is_answered(custom):
            starts.append(start)
    if not 1 <= total <= MAX_REQUESTS:
        text = f"found {total} requests, accepts 1 to {MAX_REQUESTS}"
        errors = [batch_error("invalid_request_count", text)]
    return Plan(total, ids.answered, starts, errors)


class BatchRequest(NamedTuple):
    """One request of a batch."""

    custom_id: str
    url: str
    body: bytes


def request_at(requests: Path, start: int) -> BatchRequest:
    """Return the request whose line begins at ``start``."""
    with requests.open("rb") as file:
        file.seek(start)
        line = file.readline()
    request = parse_object(line, str(requests), max_bytes=len(line))
    return BatchRequest(request["custom_id"], request["url"], body_of(request))


def append(path: Path, line: bytes) -> None:
    """Add a line to a file."""
    with open(path, "ab", opener=private) as file:
        file.write(line)


def write_results(
    requests: Path, answers: Path, good: Path, bad: Path, reason: Mapping[str, str]
) -> Results:
    """Divide the answers of a batch into two files.

    good: of the requests that were answered with status 200. bad: of the others; those
    without an answer get ``reason``.
    """
    finished, lines, sizes = set[str](), [0, 0], [0, 0]
    with (
        open(good, "wb", opener=private) as good_file,
        open(bad, "wb", opener=private) as bad_file,
    ):
        files = good_file, bad_file

        def put(line: bytes, *, failed: bool) -> None:
            sizes[failed] += files[failed].write(line)
            lines[failed] += 1

        for line in _whole_lines(answers):
            custom, failed = answered_line(line, answers)
            finished.add(custom)
            put(line, failed=failed)
        for request in read_requests(requests):
            custom = request["custom_id"]
            if custom not in finished:
                empty = {"custom_id": custom, "response": None, "error": reason}
                number = f"batch_req_{secrets.token_hex(10)}"
                put(_encoded({"id": number, **empty}), failed=True)
    return Results(*lines, *sizes)


def _whole_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _encoded(line: Mapping[str, Any]) -> bytes:
    text = json.dumps(line, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def batch_error(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error of a batch, as the API describes it."""
    return {"code": code, "message": message, "param": param, "line": None}
