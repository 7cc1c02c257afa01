"""What a dialect defines: its requests, and how answers are written in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from inl.serve.api_error import ApiError

if TYPE_CHECKING:
    from inl.serve.job import Answer, Delta, Job, Usage

T = TypeVar("T")

PLACE = re.compile(r" - at `\$\.?(.*)`$")
"""End of a validation error that names a field."""

UNKNOWN = re.compile(r"unknown field `(.*)`")


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
    """Decode a JSON body; raises :class:`ApiError` 400 that names the field."""
    try:
        return msgspec.json.decode(body or b"{}", type=schema)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown = UNKNOWN.search(text)
        place = PLACE.search(text)
        where = place[1] if place else ""
        if unknown:
            param = f"{where}.{unknown[1]}" if where else unknown[1]
            raise ApiError(
                400,
                f"{param}: is not supported; remove it",
                param=param,
                code="unsupported_parameter",
            ) from error
        problem = PLACE.sub("", text)
        raise ApiError(
            400,
            f"{where or 'body'}: {problem[:1].lower()}{problem[1:]}",
            param=where.split("[")[0].split(".")[0] or None,
            code="invalid_value",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"body: {error}; accepts one JSON object") from error
