"""The one reader of JSON that others wrote, bounded in size, depth, memory and numbers.

All that it raises is :class:`~inl.errors.InvalidJson`. Text is UTF-8, with or without a
byte-order mark. Of duplicate keys the last one counts, as for the JSON of Python and of
other servers, unless they are refused. Lone surrogates are refused, since no output
could have them. Infinity and NaN are refused unless a caller accepts them, as the
configurations of published models have them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from inl.errors import InvalidJson

MAX_BYTES: Final = 64 << 20
"""Default size limit of a text in bytes."""

MAX_DEPTH: Final = 256
"""Limit of nested lists and objects; Python's readers and writers take about 900."""

MAX_DIGITS: Final = 300
"""Digits of an integer; a float of each exists."""

MAX_MEMORY: Final = 512 << 20
"""Default limit of the memory of lists, objects, keys and places of values."""

VALUE_BYTES: Final[Mapping[bytes, int]] = {b"{": 232, b"[": 112, b":": 280, b",": 64}
"""Upper bound of the memory that each of these characters leads to.

A dict with its first table; a list with its first slots; a key and its value, with
their pair and their slot in the table while it grows; a value and its slot in a list.
"""

MOST_VALUE_BYTES: Final = max(VALUE_BYTES.values())

CHUNK: Final = 1 << 18
"""Bytes that are scanned at once."""

SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(
    text: bytes | str,
    where: str,
    *,
    max_bytes: int = MAX_BYTES,
    max_memory: int = MAX_MEMORY,
    unique_keys: bool = False,
    allow_nan: bool = False,
) -> Any:
    """Parse a JSON text; raises :class:`InvalidJson`, whose message ``where`` begins.

    max_memory: see :func:`check_json`. unique_keys: whether a key that an object has
    twice is refused. allow_nan: whether NaN and infinite numbers are accepted.
    """
    with _one_error(where):
        data = text.encode() if isinstance(text, str) else text
        check_json(data, where, max_bytes=max_bytes, max_memory=max_memory)
        value = json.loads(
            data.decode("utf-8-sig"),
            parse_int=_integer,
            parse_float=None if allow_nan else _finite,
            parse_constant=None if allow_nan else _constant,
            object_pairs_hook=_unique if unique_keys else None,
        )
        if SURROGATE.search(data):
            _check_strings(value)
    return value


def parse_object(text: bytes | str, where: str, **limits: Any) -> dict[str, Any]:
    """Parse a JSON object, as :func:`parse_json`."""
    value = parse_json(text, where, **limits)
    if not isinstance(value, dict):
        raise InvalidJson(
            f"{where}: found a JSON {type(value).__name__}; accepted: one JSON object"
        )
    return value


def read_json(path: Path, where: str, **limits: Any) -> Any:
    """Parse a file, as :func:`parse_json`; an error names it with ``where``."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidJson(f"{where}: {reason}") from error
    return parse_json(text, where, **limits)


def parse_prefix(text: str, start: int, where: str) -> tuple[Any, int]:
    """Parse the JSON value at ``start``; returns it and where it ends.

    Raises :class:`InvalidJson`, also for a value that is not complete.
    """
    with _one_error(where):
        value, stop = DECODER.raw_decode(text, start)
        check_json(text[start:stop].encode("utf-8", "replace"), where)
    return value, stop


@contextmanager
def _one_error(where: str) -> Iterator[None]:
    """Raise :class:`InvalidJson` for whatever a parse raises."""
    try:
        yield
    except InvalidJson:
        raise
    except _Refused as error:
        raise InvalidJson(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(
            f"{where}: not JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidJson(f"{where}: not JSON: {error}") from None


def check_json(
    text: bytes,
    where: str,
    *,
    max_bytes: int = MAX_BYTES,
    max_memory: int = MAX_MEMORY,
) -> None:
    """Check the size and the depth of a JSON text, and the memory of its values.

    It takes linear time, and parses nothing. max_memory: bytes of lists, objects, keys
    and places of values, without the characters of strings. Raises
    :class:`InvalidJson`.
    """
    if len(text) > max_bytes:
        raise InvalidJson(
            f"{where}: found {len(text)} bytes of JSON, accepted: up to {max_bytes}"
        )
    depth = text.count(b"[") + text.count(b"{")
    needed = len(text) * MOST_VALUE_BYTES
    if needed > max_memory:
        needed = sum(text.count(mark) * each for mark, each in VALUE_BYTES.items())
    if depth > MAX_DEPTH or needed > max_memory:
        # Those in strings are no values: strings have code and other JSON.
        depth, needed = _scan(text)
    if depth > MAX_DEPTH:
        raise InvalidJson(
            f"{where}: found JSON nested {depth} levels deep, accepted: up to "
            f"{MAX_DEPTH}"
        )
    if needed > max_memory:
        raise InvalidJson(
            f"{where}: found {len(text)} bytes of JSON, whose values may take {needed} "
            f"bytes of memory, accepted: up to {max_memory}"
        )


def _scan(text: bytes) -> tuple[int, int]:
    """Return the depth of a text and the memory of its values, outside of strings.

    NumPy releases the interpreter lock meanwhile.
    """
    import numpy as np  # which commands that list plugins do without

    steps = np.zeros(256, np.int8)
    steps[list(b"[{")], steps[list(b"]}")] = 1, -1
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    data = np.frombuffer(text, np.uint8)
    counts = np.zeros(256, np.int64)
    quotes, level, deepest = 0, 0, 0
    for start in range(0, len(data), CHUNK):
        part = data[start : start + CHUNK]
        # Wraps at 256, which keeps the parity.
        before = np.cumsum(part == ord('"'), dtype=np.uint8)
        outside = part[(before + np.uint8(quotes)) & 1 == 0]
        quotes = (quotes + int(before[-1])) & 1
        if len(outside):
            counts += np.bincount(outside, minlength=256)
            levels = np.cumsum(steps[outside], dtype=np.int64)
            deepest = max(deepest, level + int(levels.max()))
            level += int(levels[-1])
    memory = sum(int(counts[mark[0]]) * each for mark, each in VALUE_BYTES.items())
    return deepest, memory


class _Refused(Exception):
    """A value that JSON can express and this reader does not accept."""


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _Refused(
            f"found an integer of {len(text)} characters, accepted: up to {MAX_DIGITS}"
        )
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"found the number {text:.40}, accepted: numbers of 64 bits")
    return value


def _constant(text: str) -> NoReturn:
    raise _Refused(f"found {text}, accepted: finite numbers")


DECODER: Final = json.JSONDecoder(
    parse_int=_integer, parse_float=_finite, parse_constant=_constant
)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise _Refused(f"key {duplicate!r:.80}: found twice; accepted: each key once")
    return fields


def _check_strings(value: Any) -> None:
    """Raise for a string that cannot be encoded, which only an escape leads to."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting += part.keys()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, str) and not part.isascii():
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise _Refused(
                    f"found the string {part[:40]!a} with half of a surrogate "
                    f"pair at character {error.start}, accepted: characters"
                ) from None
