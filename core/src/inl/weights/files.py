"""Memory-mapped model files, bounds-checked tensor entries, and JSON parsing."""

from __future__ import annotations

import json
import math
import mmap
import os
import reprlib
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.backend.weight_cache import FileIdentity
from inl.dtypes import SIZES, HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_JSON = 256 << 20
"""Size limit of a JSON file in bytes; real tokenizers are below 40 MiB."""

MAX_ELEMENTS = 1 << 48
"""Size limit of a tensor in elements."""


class Entry(NamedTuple):
    """Dtype, shape and byte range of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    stop: int
    """Offset behind the last byte."""


class MappedFile:
    """Read-only memory map of a file; raises :class:`CheckpointError` on I/O errors.

    Arrays made from it keep the map alive, so it may be closed before them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.identity = FileIdentity.of(os.fstat(file.fileno()))
                self.size = self.identity.size
                self.data: mmap.mmap | bytes | None = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    if self.size
                    else b""  # an empty file cannot be mapped
                )
        except OSError as error:
            raise unreadable(path, error) from error

    @property
    def buffer(self) -> mmap.mmap | bytes:
        """The bytes; raises :class:`CheckpointError` after :meth:`close`."""
        if self.data is None:
            raise CheckpointError(f"{self.path}: file is closed; open it again to read")
        return self.data

    def array(self, entry: Entry) -> HostArray:
        """View a tensor of a plain dtype; copies it if its bytes are unaligned."""
        import numpy as np

        stored = np.dtype("uint16" if entry.dtype == "bfloat16" else entry.dtype)
        data: NDArray[Any] = np.ndarray(entry.shape, stored, self.buffer, entry.start)
        return HostArray(np.require(data, requirements="A"), entry.dtype, entry.shape)

    def rows(self, entry: Entry) -> NDArray[np.uint8]:
        """View a quantized tensor as uint8 ``[rows..., bytes per row]``."""
        import numpy as np

        outer = entry.shape[:-1]
        count = max(1, math.prod(outer))
        shape = (*outer, (entry.stop - entry.start) // count)
        return np.ndarray(shape, np.uint8, self.buffer, entry.start)

    def drop(self, entry: Entry) -> None:
        """Release the memory pages of a tensor (a no-op on Windows).

        Arrays that view them read the file again on their next use.
        """
        if sys.platform != "win32" and isinstance(self.data, mmap.mmap):
            start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            if start < entry.stop:
                self.data.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)

    def close(self) -> None:
        """Release the map; it is unmapped with the last array that views it."""
        # Not data.close(): arrays hold no lock on the buffer and would read freed
        # pages.
        self.data = None


def plain_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor of a plain (not quantized) dtype."""
    return math.prod(shape) * SIZES[dtype]


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether a shape has fewer than 2**48 elements; empty axes count as 1."""
    return math.prod(size or 1 for size in shape) < MAX_ELEMENTS


def check_apart(path: Path, entries: Mapping[str, Entry]) -> None:
    """Raise :class:`CheckpointError` where two tensors share bytes."""
    end, previous = 0, ""
    for name, entry in in_order(entries):
        if entry.start < end:
            raise CheckpointError(
                f"{path}: tensor {name!r}: begins at byte {entry.start}, inside "
                f"{previous!r} that ends at {end}; accepted: tensors that do not "
                "overlap"
            )
        end, previous = entry.stop, name


def in_order(entries: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """Return tensors sorted by file offset, without empty ones."""
    nonempty = [item for item in entries.items() if item[1].stop > item[1].start]
    return sorted(nonempty, key=lambda item: item[1].start)


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys; ``where`` prefixes error messages.

    Raises :class:`CheckpointError`.
    """
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
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


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises :class:`CheckpointError`."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise CheckpointError(
                f"{path}: found {size} bytes; accepted: at most {MAX_JSON}"
            )
        text = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_json(text, str(path))


def listing(folder: Path) -> str:
    """Return the first eight names in a folder, for an error message."""
    try:
        names = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    return (", ".join(names[:8]) or "nothing") + (", ..." if len(names) > 8 else "")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file or folder that cannot be read."""
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror}; "
        "accepted: a path that this user may read"
    )


def show(value: Any) -> str:
    """Return a truncated ``repr`` of an invalid value, for an error message."""
    return _SHORT.repr(value)


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise CheckpointError(
            f"{where}: key {show(duplicate)}: found twice; accepted: each key once"
        )
    return fields


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
