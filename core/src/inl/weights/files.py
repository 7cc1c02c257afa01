"""A model's files: mapped read-only, looked at through checked ranges."""

from __future__ import annotations

import json
import math
import mmap
import reprlib
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.dtypes import SIZES, HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_JSON = 256 << 20
"""Bytes of the largest JSON file that is read; real tokenizers stay under 40 MiB."""

MAX_ELEMENTS = 1 << 48


class Entry(NamedTuple):
    """Where a tensor lies in its file, and what it holds."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    """Bytes ``start .. stop`` of the file."""


class MappedFile:
    """A file's bytes, unread; :class:`CheckpointError` where they cannot be had.

    Arrays made from it keep the map alive, so closing it under them is safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
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
            raise CheckpointError(f"{self.path}: is closed; open it again to read")
        return self.data

    def array(self, entry: Entry) -> HostArray:
        """View a tensor of a plain dtype, or copy it where its bytes are unaligned."""
        import numpy as np

        stored = np.dtype("uint16" if entry.dtype == "bfloat16" else entry.dtype)
        data: NDArray[Any] = np.ndarray(entry.shape, stored, self.buffer, entry.start)
        return HostArray(np.require(data, requirements="A"), entry.dtype, entry.shape)

    def rows(self, entry: Entry) -> NDArray[np.uint8]:
        """View a packed tensor as uint8 ``[rows..., bytes per row]``."""
        import numpy as np

        outer = entry.shape[:-1]
        count = max(1, math.prod(outer))
        shape = (*outer, (entry.stop - entry.start) // count)
        return np.ndarray(shape, np.uint8, self.buffer, entry.start)

    def drop(self, entry: Entry) -> None:
        """Give a tensor's pages back to the system, where it can.

        Arrays that look at them read the file again when they are next used.
        """
        if sys.platform != "win32" and isinstance(self.data, mmap.mmap):
            start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            if start < entry.stop:
                self.data.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)

    def close(self) -> None:
        """Let go of the map; it goes when the last array that looks at it does."""
        # Not data.close(): arrays do not lock their buffer, and would read freed pages.
        self.data = None


def plain_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor whose dtype is not packed."""
    return math.prod(shape) * SIZES[dtype]


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a shape can be addressed at all, its empty axes left aside."""
    return math.prod(size or 1 for size in shape) < MAX_ELEMENTS


def check_apart(path: Path, entries: Mapping[str, Entry]) -> None:
    """Raise :class:`CheckpointError` where two tensors share bytes."""
    end, before = 0, ""
    for name, entry in in_order(entries):
        if entry.start < end:
            raise CheckpointError(
                f"{path}: tensor {name!r}: begins at byte {entry.start}, inside "
                f"{before!r} that ends at {end}; accepted: tensors that do not overlap"
            )
        end, before = entry.stop, name


def in_order(entries: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """Tensors by their place in the file; those without bytes have none."""
    used = [item for item in entries.items() if item[1].stop > item[1].start]
    return sorted(used, key=lambda item: item[1].start)


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object and refuse duplicate keys; ``where`` begins each message."""
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{where}: not JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}; accepted: one JSON object"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON that is accepted: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{where}: found a JSON {type(found).__name__}; accepted: one JSON object"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
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
    """Name what a folder holds, for a message."""
    try:
        inside = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    return (", ".join(inside[:8]) or "nothing") + (", ..." if len(inside) > 8 else "")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file or folder that the system does not give."""
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror}; accepted: what this user may read"
    )


def show(found: Any) -> str:
    """Write a bad value into a message, cut so that it cannot fill the screen."""
    return _SHORT.repr(found)


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise CheckpointError(
            f"{where}: key {show(twice)} is there twice; accepted: once"
        )
    return found


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
