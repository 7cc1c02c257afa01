"""Model files, and bounds-checked entries of the tensors in them."""

from __future__ import annotations

import math
import os
import reprlib
import stat
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.backend.weight_cache import FileIdentity
from inl.dtypes import E8M0, FLOAT8, SIZES, HostArray
from inl.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BYTES: Final = (*FLOAT8, E8M0)
"""Dtypes of one byte that NumPy lacks."""
MAX_ELEMENTS: Final = 1 << 48
"""Size limit of a tensor in elements."""
MAX_TENSORS: Final = 1 << 17
"""Limit of the tensors in one file; shards of large models have some thousands."""
OVERHEAD: Final = 48 << 20
"""Bytes that a reader may take beside 3 times the size of its file."""

READ_ONLY: Final = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")
)
NOT_A_LINK: Final = getattr(os, "O_NOFOLLOW", 0)
FILE_KINDS: Final = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}
"""Names of the kinds of files that are not regular."""


class Entry(NamedTuple):
    """Dtype, shape and byte range of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    stop: int
    """Offset behind the last byte."""


class TensorFile:
    """A regular file, read with positioned reads; raises :class:`CheckpointError`.

    It is not mapped: a file that another process truncates is then an error, while
    access to a map of it ends the process with SIGBUS. Thread-safe.

    folder: if given, links to files outside of it are refused, see :func:`resolve`.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path
        descriptor = open_regular(path, folder)
        self.identity = FileIdentity.of(os.fstat(descriptor))
        self.size = self.identity.size
        self._lock = threading.Lock()
        self._descriptor = descriptor
        self.close = weakref.finalize(self, os.close, descriptor)
        """Closes the file; arrays that were read stay valid."""

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``."""
        data = bytearray(stop - start)
        self.read_into(memoryview(data), start)
        return bytes(data)

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill a buffer of bytes from offset ``start`` on."""
        done = 0
        while done < len(target):
            try:
                count = self._read(target[done:], start + done)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not count:
                raise CheckpointError(
                    f"{self.path}: found its end at byte {start + done} of {self.size}:"
                    " it was truncated after it was opened; accepted: a file that does "
                    "not change"
                )
            done += count

    def _read(self, target: memoryview, start: int) -> int:
        if not self.close.alive:
            raise CheckpointError(f"{self.path}: file is closed; open it again to read")
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [target], start)
        with self._lock:  # Windows
            os.lseek(self._descriptor, start, os.SEEK_SET)
            data = os.read(self._descriptor, len(target))
        target[: len(data)] = data
        return len(data)

    def array(self, entry: Entry) -> HostArray:
        """Read a tensor of a plain dtype; the array is read-only."""
        import numpy as np

        bits = {"bfloat16": "uint16", **dict.fromkeys(BYTES, "uint8")}
        stored = np.dtype(bits.get(entry.dtype, entry.dtype))
        data = self._bytes(entry).view(stored).reshape(entry.shape)
        return HostArray(data, entry.dtype, entry.shape, origin=(self, entry.start))

    def rows(self, entry: Entry) -> HostArray:
        """Read a quantized tensor as uint8 ``[rows..., bytes per row]``, read-only."""
        outer = entry.shape[:-1]
        count = max(1, math.prod(outer))
        data = self._bytes(entry).reshape(*outer, (entry.stop - entry.start) // count)
        return HostArray(data, entry.dtype, entry.shape, origin=(self, entry.start))

    def _bytes(self, entry: Entry) -> NDArray[np.uint8]:
        import numpy as np

        data = np.empty(entry.stop - entry.start, np.uint8)
        self.read_into(data.data, entry.start)
        data.flags.writeable = False
        return data


def open_regular(path: Path, folder: Path | None = None) -> int:
    """Open a regular file for reading and return its descriptor.

    Never waits, as opening a FIFO does. folder: see :func:`resolve`. Raises
    :class:`CheckpointError` for any other kind of file.
    """
    target, flags = path, READ_ONLY
    if folder is not None:
        target, flags = resolve(path, folder), READ_ONLY | NOT_A_LINK
    try:
        descriptor = os.open(target, flags)
    except OSError as error:
        raise unreadable(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kind = FILE_KINDS.get(stat.S_IFMT(mode), "special file")
    raise CheckpointError(f"{path}: found a {kind}; accepted: a regular file")


def read_bytes(path: Path, most: int, folder: Path | None = None) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    Raises :class:`CheckpointError`. folder: see :func:`resolve`.
    """
    with os.fdopen(open_regular(path, folder), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(
                f"{path}: found {size} bytes; accepted: at most {most}"
            )
        try:
            return file.read(size)
        except OSError as error:
            raise unreadable(path, error) from error


def resolve(path: Path, folder: Path) -> Path:
    """Return the target of a link in a model folder, else ``path`` itself.

    Raises :class:`CheckpointError` for a target outside the folder. Links of the hub's
    cache, from ``snapshots/REVISION`` to ``blobs``, are accepted.
    """
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    snapshots = [each for each in root.parents if each.name == "snapshots"]
    roots = [root, *(each.parent / "blobs" for each in snapshots)]
    if any(target.is_relative_to(each) for each in roots):
        return target
    raise CheckpointError(
        f"{path}: found a link to {target}, outside of the model's folder; accepted: "
        "files in the folder, and links to the blobs of the hub's cache"
    )


def plain_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor of a plain (not quantized) dtype."""
    return math.prod(shape) * (1 if dtype in BYTES else SIZES[dtype])


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


def listing(folder: Path) -> str:
    """Return the first eight names in a folder, for an error message."""
    try:
        names = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    return (", ".join(names[:8]) or "nothing") + (", ..." if len(names) > 8 else "")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file or folder that cannot be read."""
    absent = isinstance(error, FileNotFoundError)
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror}; "
        f"accepted: a path that {'exists' if absent else 'this user may read'}"
    )


def show(value: Any) -> str:
    """Return a truncated ``repr`` of an invalid value, for an error message."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
