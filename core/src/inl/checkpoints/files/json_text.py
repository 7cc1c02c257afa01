"""JSON files whose parse is bounded in memory before it begins."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from inl.checkpoints.files.tensor_file import OVERHEAD, read_bytes, show
from inl.errors import CheckpointError

MAX_JSON: Final = 64 << 20
"""Size limit of a JSON file in bytes; indexes of large models take 15 MB."""

MAX_VALUES: Final = 512 << 20
"""Limit of the memory of a parse whatever the file's size, which also limits its time;
the header of 131,072 tensors takes half of it."""

VALUE_BYTES: Final[Mapping[bytes, int]] = {b"{": 232, b"[": 112, b":": 280, b",": 64}
"""Upper bound of the memory that each of these characters leads to.

A dict with its first table; a list with its first slots; a key and its value, with
their pair and their slot in the table while it grows; a value and its slot in a list.
"""


def parse_json(text: bytes, where: str, file_size: int = 0) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys; ``where`` prefixes error messages.

    file_size: size of the file with the text, if it is a part. Raises
    :class:`CheckpointError`, also for a text whose values would take more than three
    times the size of the file.
    """
    _check_memory(text, max(len(text), file_size), where)
    try:
        value = json.loads(
            text.decode("utf-8-sig"),
            object_pairs_hook=lambda pairs: _unique(pairs, where),
        )
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where}: not JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}; accepted: one JSON object"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: not JSON: {error}; accepted: one JSON object"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: found a JSON {type(value).__name__}; accepted: one JSON object"
        )
    return value


def read_json(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Read a JSON object from a file; raises :class:`CheckpointError`.

    folder: see :func:`inl.checkpoints.files.tensor_file.resolve`.
    """
    return parse_json(read_bytes(path, MAX_JSON, folder), str(path))


def _check_memory(text: bytes, file_size: int, where: str) -> None:
    """Raise for a text whose values may take too much memory; counts, parses nothing.

    Characters in strings are counted too, which only errs to the safe side.
    """
    values = sum(text.count(mark) * each for mark, each in VALUE_BYTES.items())
    widest = max(text, default=0)
    width = 4 if widest >= 0xF0 else 2 if widest >= 0xC4 else 1
    escaped = 4 if b"\\u" in text else width
    needed = len(text) * (1 + width + escaped) + values
    most = min(3 * file_size, MAX_VALUES) + OVERHEAD
    if needed > most:
        raise CheckpointError(
            f"{where}: found {len(text)} bytes of JSON, whose values may take {needed} "
            f"bytes of memory; accepted: up to {most}, which is {OVERHEAD} and 3 times "
            f"the size of the file, but {MAX_VALUES} at most"
        )


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise CheckpointError(
            f"{where}: key {show(duplicate)}: found twice; accepted: each key once"
        )
    return fields
