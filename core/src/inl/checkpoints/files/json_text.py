"""JSON files of checkpoints, whose parse is bounded in memory before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from inl import bounded_json
from inl.checkpoints.files.tensor_file import OVERHEAD, read_bytes
from inl.errors import CheckpointError, InvalidJson

MAX_JSON: Final = 64 << 20
"""Size limit of a JSON file in bytes; indexes of large models take 15 MB."""

MAX_VALUES: Final = 512 << 20
"""Limit of the memory of a parse whatever the file's size, which also limits its time;
the header of 131,072 tensors takes half of it."""


def parse_json(
    text: bytes, where: str, file_size: int = 0, *, unique_keys: bool = False
) -> dict[str, Any]:
    """Parse a JSON object; ``where`` prefixes error messages.

    file_size: size of the file with the text, if it is a part. unique_keys: whether a
    key that is found twice is refused, as by the format of safetensors; of a
    configuration the last one counts, as for transformers. NaN and Infinity are
    accepted, which configurations have. Raises :class:`CheckpointError`, also for a
    text whose values would take more than three times the size of the file.
    """
    strings, most = _string_bytes(text), _most(max(len(text), file_size))
    if strings > most:
        raise CheckpointError(
            f"{where}: found {len(text)} bytes of JSON, whose strings may take "
            f"{strings} bytes of memory; accepted: up to {most}"
        )
    try:
        return bounded_json.parse_object(
            text,
            where,
            max_memory=most - strings,
            unique_keys=unique_keys,
            allow_nan=True,
        )
    except InvalidJson as error:
        raise CheckpointError(f"{error}; accepted: one JSON object") from error


def read_json(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Read a JSON object from a file; raises :class:`CheckpointError`.

    folder: see :func:`inl.checkpoints.files.tensor_file.resolve`.
    """
    return parse_json(read_bytes(path, MAX_JSON, folder), str(path))


def _string_bytes(text: bytes) -> int:
    """Return an upper bound of the memory of the text, decoded, and of its strings."""
    widest = max(text, default=0)
    width = 4 if widest >= 0xF0 else 2 if widest >= 0xC4 else 1
    escaped = 4 if b"\\u" in text else width
    return len(text) * (1 + width + escaped)


def _most(file_size: int) -> int:
    return min(3 * file_size, MAX_VALUES) + OVERHEAD
