"""What a dialect defines: its requests, and how answers are written in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from inl.serve.absent_fields import Defaults, without_absent
from inl.serve.api_error import ApiError

if TYPE_CHECKING:
    from inl.serve.job import Answer, Delta, Job, Usage
    from inl.serve.token_texts import TokenTexts

T = TypeVar("T")

PLACE = re.compile(r" - at `\$\.?(.*)`$")
"""End of a validation error that names a field."""

UNKNOWN = re.compile(r"unknown field `(.*)`")

NO_DEFAULTS: Defaults = {}

ReadUsage = Callable[[], "Usage"]
"""Returns the tokens so far; few dialects report them with each delta."""


class Exchange(Protocol):
    """One request in a dialect, and the writer of its response."""

    job: Job
    token_text: TokenTexts
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


def parse(body: bytes, schema: type[T], defaults: Defaults = NO_DEFAULTS) -> T:
    """Decode a JSON body; raises :class:`ApiError` 400 that names the field.

    A member that is null is absent. defaults: fields that are not supported, with the
    values that change nothing, which are accepted.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=schema)
    except msgspec.ValidationError as error:
        first = error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"body: {error}; accepts one JSON object") from error
    if b"null" not in body and not any(name.encode() in body for name in defaults):
        raise _refused(first, defaults) from first
    try:
        fields = without_absent(msgspec.json.decode(body), schema, defaults)
        return msgspec.convert(fields, schema, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refused(error, defaults) from error


def _refused(error: msgspec.ValidationError, defaults: Defaults) -> ApiError:
    """Return the error that names the field of a validation error."""
    text = str(error)
    unknown = UNKNOWN.search(text)
    place = PLACE.search(text)
    where = place[1] if place else ""
    if unknown:
        param = f"{where}.{unknown[1]}" if where else unknown[1]
        accepted = " or ".join(repr(each) for each in defaults.get(param, ()))
        problem = f", accepts {accepted}" if accepted else ""
        return ApiError(
            400,
            f"{param}: is not supported{problem}; remove it",
            param=param,
            code="unsupported_parameter",
        )
    problem = PLACE.sub("", text)
    return ApiError(
        400,
        f"{where or 'body'}: {problem[:1].lower()}{problem[1:]}",
        param=where.split("[")[0].split(".")[0] or None,
        code="invalid_value",
    )
