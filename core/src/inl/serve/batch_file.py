"""Files of requests and of answers, as OpenAI's batch interface describes them.

Both may have millions of lines: they are read line by line, and of the requests only a
digest of each id is kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec
import numpy as np

from inl.bounded_json import parse_object
from inl.errors import RequestError
from inl.file_lock import locked

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

DIGEST = np.dtype("S16")
"""Digest of an id; two ids of a file have the same one with odds of 1 to 10^26."""

LINES_AHEAD = 64
"""Lines that are read at a time."""

COPY_BYTES = 1 << 20


class _Response(msgspec.Struct):
    status_code: int


class _AnswerLine(msgspec.Struct):
    """What is read of an answer; its body may be of any size."""

    custom_id: str
    response: _Response


class RequestIds:
    """The ids of a file of requests, and which of them are answered.

    Takes 17 bytes a request. digests: of the ids, one after the other.
    """

    def __init__(self, digests: bytes | bytearray) -> None:
        self._digests = np.sort(np.frombuffer(digests, DIGEST))
        self._is_answered = np.zeros(len(self._digests), np.bool_)
        self.answered = 0

    def __len__(self) -> int:
        return len(self._digests)

    def is_answered(self, custom_id: str) -> bool:
        """Whether a request has an answer."""
        place = self._find(custom_id)
        return place is not None and bool(self._is_answered[place])

    def mark(self, custom_id: str) -> None:
        """Record the answer of a request; nothing for an id of another file."""
        place = self._find(custom_id)
        if place is not None and not self._is_answered[place]:
            self._is_answered[place] = True
            self.answered += 1

    def repeated(self) -> np.bytes_ | None:
        """Return a digest that two requests have; ``None`` if there is none."""
        same = self._digests[1:] == self._digests[:-1]
        return self._digests[same.argmax()] if same.any() else None

    def _find(self, custom_id: str) -> int | None:
        digest = np.array(_digest(custom_id), DIGEST)
        place = int(self._digests.searchsorted(digest))
        is_there = place < len(self) and self._digests[place] == digest
        return place if is_there else None


def _digest(custom_id: str) -> bytes:
    data = custom_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST.itemsize).digest()


def index_requests(path: Path) -> RequestIds:
    """Read a file of requests to its end; raises :class:`RequestError` for a bad line.

    The file is read again to answer them, so it cannot be a pipe.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{path}: found no regular file; accepts one, read twice")
    digests = bytearray()
    for request in read_requests(path):
        digests += _digest(request["custom_id"])
    ids = RequestIds(digests)
    if (repeated := ids.repeated()) is not None:
        _refuse_repeated(path, repeated)
    return ids


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of a file; raises :class:`RequestError` for a bad line."""
    return (request for _, _, request in _numbered(path))


def placed_requests(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the requests of a file, each with the place where its line begins."""
    return ((start, request) for _, start, request in _numbered(path))


def body_of(request: dict[str, Any]) -> bytes:
    """Return the body of a request, as its endpoint reads it."""
    fixed = FIXED.get(request["url"], {"stream": False})
    return json.dumps({**request["body"], **fixed}).encode()


async def unanswered(path: Path, ids: RequestIds) -> AsyncIterator[dict[str, Any]]:
    """Yield the requests of a file that had no answer; reads it on a thread."""
    requests = read_requests(path)
    while lines := await asyncio.to_thread(lambda: [*islice(requests, LINES_AHEAD)]):
        for request in lines:
            if not ids.is_answered(request["custom_id"]):
                yield request


def _numbered(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield each request with the number and the place of its line."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            request = parse_object(line, where, max_bytes=MAX_LINE)
            custom, url = request.get("custom_id"), request.get("url")
            valid = isinstance(custom, str) and isinstance(request.get("body"), dict)
            if not valid or url not in PATHS:
                _refuse_request(where, custom, url)
            yield number, file.tell() - len(line), request


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines; one that is longer than accepted ends after its first byte more."""
    return iter(lambda: file.readline(MAX_LINE + 1), b"")


def _refuse_request(where: str, custom: Any, url: Any) -> NoReturn:
    raise RequestError(
        f"{where}: found custom_id {custom!r:.60} and url {url!r:.60}; "
        "accepts a custom_id that no other line has, an object as body, "
        f"and {', '.join(PATHS)}"
    )


def _refuse_repeated(path: Path, digest: bytes) -> NoReturn:
    """Raise with the number of the second line that has an id."""
    repeated = np.array(digest, DIGEST)
    lines = (
        (number, request)
        for number, _, request in _numbered(path)
        if np.array(_digest(request["custom_id"]), DIGEST) == repeated
    )
    next(lines)
    number, request = next(lines)
    _refuse_request(f"{path}, line {number}", request["custom_id"], request["url"])


def find_answers(path: Path, ids: RequestIds) -> None:
    """Mark the requests that a file has answers of.

    Drops an incomplete last line, the lines of failed requests, which are to run again,
    and further answers of a request. Raises :class:`RequestError`, and leaves the file
    as it is, if a line is no answer.
    """
    if not path.exists():
        return
    rest = path.with_name(path.name + ".part")
    try:
        end, is_copied = _divide(path, rest, ids)
        if is_copied:
            rest.replace(path)
        elif end < path.stat().st_size:
            os.truncate(path, end)
    finally:
        rest.unlink(missing_ok=True)


def _divide(path: Path, rest: Path, ids: RequestIds) -> tuple[int, bool]:
    """Copy the answers that are to stay, unless they are the beginning of the file.

    Returns where its complete lines end, and whether there is a copy.
    """
    end, copy = 0, None
    with path.open("rb") as file, ExitStack() as opened:
        for number, start in enumerate(_lines(file), 1):
            line = start
            if not line.endswith(b"\n"):
                if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                    _refuse_answer(path, number, line)
                line += file.readline()  # an answer may be longer than requests are
                if not line.endswith(b"\n"):
                    break
            custom, failed = answered_line(line, path, number)
            stays = not failed and not ids.is_answered(custom)
            if stays:
                ids.mark(custom)
                if copy is not None:
                    copy.write(line)
            elif copy is None:
                copy = opened.enter_context(rest.open("wb"))
                _copy_beginning(path, copy, end)
            end += len(line)
    return end, copy is not None


def _copy_beginning(path: Path, copy: IO[bytes], size: int) -> None:
    with path.open("rb") as file:
        while size and (data := file.read(min(size, COPY_BYTES))):
            copy.write(data)
            size -= len(data)


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
