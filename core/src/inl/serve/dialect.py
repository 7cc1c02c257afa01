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
from inl.serve.absent_fields import Defaults, without_absent
from inl.serve.api_error import ApiError, as_api_error

if TYPE_CHECKING:
    from inl.serve.event_stream import StreamFormat
    from inl.serve.job import Answer, Delta, Job, Usage
    from inl.serve.token_texts import TokenTexts

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

NO_DEFAULTS: Defaults = {}

ReadUsage = Callable[[], "Usage"]
"""Returns the tokens so far; few dialects report them with each delta."""


class StreamWriter(Protocol):
    """Writes the events of a stream."""

    def opening(self, usage: Usage) -> bytes:
        """Return the events before the first delta."""

    def delta(self, index: int, delta: Delta, usage: ReadUsage) -> bytes:
        """Return the events of a delta."""

    def closing(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the events after the last delta."""

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an error in mid-stream."""


class Exchange(StreamWriter, Protocol):
    """One request in a dialect, and the writer of its response."""

    job: Job
    stream_format: StreamFormat
    token_text: TokenTexts
    """Set once the model is loaded."""

    def body(self, answers: Sequence[Answer], usage: Usage) -> Any:
        """Return the whole response."""


MakeExchange = Callable[[bytes, str, str], Exchange]
"""Parses a body: (body, number of the request, name of the default model).

Raises :class:`ApiError` and the engine's errors.
"""


def parse(body: bytes, schema: type[T], defaults: Defaults = NO_DEFAULTS) -> T:
    """Decode a JSON body; raises :class:`ApiError` 400 that names the field.

    A member that is null is absent; of one that is found twice, the last counts.
    defaults: fields that are not supported, with the values that change nothing, which
    are accepted.
    """
    body = body.removeprefix(codecs.BOM_UTF8) or b"{}"
    try:
        check_json(body, "body", max_bytes=len(body), max_memory=MAX_MEMORY)
        with gc_disabled() if len(body) > LARGE else nullcontext():
            return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        # A variable of this function would refer to the error, which refers to it.
        return _parse_again(body, schema, defaults, error)
    except InvalidJson as error:
        raise as_api_error(error) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError, MemoryError) as error:
        raise _malformed(error) from error


def _parse_again(
    body: bytes, schema: type[T], defaults: Defaults, first: msgspec.ValidationError
) -> T:
    """Decode a body whose absent fields keep it from being decoded as it is."""
    if b"null" not in body and not any(name.encode() in body for name in defaults):
        raise _refused(str(first), defaults) from first
    try:
        # The values of the body have been counted before.
        with gc_disabled() if len(body) > LARGE else nullcontext():
            fields = without_absent(msgspec.json.decode(body), schema, defaults)
            return msgspec.convert(fields, schema, str_keys=True)
    except msgspec.ValidationError as error:
        raise _refused(str(error), defaults) from error
    except msgspec.DecodeError as error:
        # Behind the place at which the types did not fit.
        raise _malformed(error) from error


def _malformed(error: Exception) -> ApiError:
    return ApiError(
        400, f"body: {error}; accepts one JSON object", code="invalid_value"
    )


def _refused(text: str, defaults: Defaults) -> ApiError:
    """Return the error for a validation error's text, in linear time."""
    before, place, after = text.rpartition(PLACE)
    problem = before if place else text
    where = after[:-1].removeprefix(".")[:SHOWN] if place else ""
    unknown = UNKNOWN.search(problem)
    if unknown:
        name = unknown[1][:SHOWN]
        param = f"{where}.{name}" if where else name
        accepted = " or ".join(repr(each) for each in defaults.get(param, ()))
        accepts = f", accepts {accepted}" if accepted else ""
        return ApiError(
            400,
            f"{param}: is not supported{accepts}; remove it",
            param=param,
            code="unsupported_parameter",
        )
    return ApiError(
        400,
        f"{where or 'body'}: {problem[:1].lower()}{problem[1:]}",
        param=where.split("[")[0].split(".")[0] or None,
        code="invalid_value",
    )
