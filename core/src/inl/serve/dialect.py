"""What a dialect defines: its requests, and how answers are written in it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from inl.bounded_json import check_json
from inl.errors import InvalidJson
from inl.garbage_collection import gc_disabled
from inl.serve.api_error import ApiError, as_api_error

if TYPE_CHECKING:
    from inl.serve.job import Answer, Delta, Job, Usage

T = TypeVar("T")

PLACE = " - at `$"
"""Before the field that a validation error names at its end."""

UNKNOWN = re.compile(r"unknown field `([^`]*)")

SHOWN = 100
"""Characters of a field's name that an error message has."""

LARGE = 32 << 10
"""Bytes of a body whose values the garbage collector would visit again and again."""

MAX_MEMORY = 33 << 20
"""Bytes that the values of a body may take, beside their characters: half a million
token ids. Decoding or freeing that many takes up to 40 ms, in which no other thread
runs."""


ReadUsage = Callable[[], "Usage"]
"""Returns the tokens so far; few dialects report them with each delta."""


TokenText = Callable[[int], bytes]
"""Returns the bytes of a token."""


def no_token_text(_: int) -> bytes:
    """Return no text: before the model is known."""
    return b""


class Exchange(Protocol):
    """One request in a dialect, and the writer of its response."""

    job: Job
    token_text: TokenText
    """Set once the model is loaded."""

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response."""

    def opening(self, usage: Usage) -> bytes:
        """Return the events before the first delta."""

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the events of a delta."""

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the events after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an error in mid-stream."""


MakeExchange = Callable[[bytes, str, str], Exchange]
"""Parses a body: (body, number of the request, name of the default model).

Raises :class:`ApiError` and the engine's errors.
"""


def parse(body: bytes, schema: type[T]) -> T:
    """Decode a JSON body; raises :class:`ApiError` 400 that names the field.

    Of a field that is found twice, the last one counts.
    """
    body = body.removeprefix(codecs.BOM_UTF8) or b"{}"
    try:
        check_json(body, "body", max_bytes=len(body), max_memory=MAX_MEMORY)
        with gc_disabled() if len(body) > LARGE else nullcontext():
            return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except InvalidJson as error:
        raise as_api_error(error) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError, MemoryError) as error:
        raise ApiError(
            400, f"body: {error}; accepts one JSON object", code="invalid_value"
        ) from error


def _invalid(text: str) -> ApiError:
    """Return the error for a validation error's text, in linear time."""
    before, place, after = text.rpartition(PLACE)
    problem = before if place else text
    where = after[:-1].removeprefix(".")[:SHOWN] if place else ""
    unknown = UNKNOWN.search(problem)
    if unknown:
        name = unknown[1][:SHOWN]
        param = f"{where}.{name}" if where else name
        return ApiError(
            400,
            f"{param}: is not supported; remove it",
            param=param,
            code="unsupported_parameter",
        )
    return ApiError(
        400,
        f"{where or 'body'}: {problem[:1].lower()}{problem[1:]}",
        param=where.split("[")[0].split(".")[0] or None,
        code="invalid_value",
    )
