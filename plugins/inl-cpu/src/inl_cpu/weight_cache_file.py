"""A file of packed weights: blocks, then a description of them, then its digest.

The blocks come first and are written two mebibytes at a time, so that a file system
with large pages maps them in large pages: with small ones, weights are read a quarter
slower.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl_cpu.memory import aligned

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGE: Final = 2 << 20
"""Bytes of a large page."""
ALIGNMENT: Final = 64
TRAILER: Final = struct.Struct("<Q32s8s")
"""Bytes of the description, its digest, and the magic number."""
MAGIC: Final = b"INLTILE1"
BUDGET: Final = 8 << 30
"""Bytes that all files of a folder may take; those unused for longest go."""
SPARE: Final = 1 << 30
"""Bytes that are left free on the disk."""
ABANDONED_SECONDS: Final = 3600
"""Age of an unfinished file that nobody writes to any more."""
POPULATE_READ: Final = 22
"""``madvise`` of Linux 5.14: map all pages now."""
SMAPS: Final = Path("/proc/self/smaps_rollup")


class Damaged(Exception):
    """A file is not as it was written."""


class Part(NamedTuple):
    """One block of a file."""

    what: tuple[int, ...]
    start: int
    size: int


class KeptFile:
    """A file's parts, mapped where that is as fast as memory, else read.

    Raises :class:`Damaged`, or :class:`OSError` where it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.parts, sums, size = _description(file)
            self._data = _mapped(file.fileno(), size)
            for number, total in enumerate(sums):
                if checksum(self._data[number * LARGE : (number + 1) * LARGE]) != total:
                    raise Damaged(f"damaged after byte {number * LARGE}")
            with suppress(OSError):
                os.utime(path)  # when it was last used

    def view(self, part: Part) -> NDArray[np.uint8]:
        """The bytes of one part."""
        return self._data[part.start : part.start + part.size]


def checksum(piece: NDArray[np.uint8]) -> int:
    """Sum of a piece's words: finds what was cut off, zeroed or flipped."""
    return int(np.add.reduce(piece.view(np.uint64)))


def _description(file: Any) -> tuple[list[Part], list[int], int]:
    """Parts, the checksum of each large page, and the bytes of all pages."""
    size = file.seek(0, os.SEEK_END)
    if size < TRAILER.size:
        raise Damaged(f"cut short at byte {size}")
    file.seek(size - TRAILER.size)
    length, digest, magic = TRAILER.unpack(file.read(TRAILER.size))
    begin = size - TRAILER.size - length
    if magic != MAGIC or begin < 0:
        raise Damaged("cut short, or no such file")
    file.seek(begin)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise Damaged("damaged in its description")
    described, sums = json.loads(text)
    parts = [Part(tuple(what), *place) for what, *place in described]
    if begin != len(sums) * LARGE or parts[-1].start + parts[-1].size > begin:
        raise Damaged("cut short")
    return parts, sums, begin


def _mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    before = _large_mapped()
    whole = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    with suppress(OSError, ValueError, AttributeError):
        whole.madvise(mmap.MADV_HUGEPAGE)
        whole.madvise(POPULATE_READ)
    if _large_mapped() - before >= size // 2:
        return np.frombuffer(whole, np.uint8)
    whole.close()
    memory = aligned(size)
    at = 0
    while at < size:
        got = os.preadv(descriptor, [memory[at:].data], at)
        if not got:
            raise Damaged(f"cut short at byte {at}")
        at += got
    return memory


def _large_mapped() -> int:
    """Bytes of files that this process has mapped in large pages."""
    with suppress(OSError, ValueError):
        for line in SMAPS.read_text().splitlines():
            if line.startswith("FilePmdMapped:"):
                return int(line.split()[1]) << 10
    return 0


def write(
    path: Path,
    blocks: Sequence[tuple[tuple[int, ...], Any]],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write (signature, block) pairs atomically; raises OSError.

    progress: called with (bytes written, bytes in total).
    """
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(block.nbytes for _, block in blocks)
    system = os.statvfs(folder)
    if size > BUDGET or size + SPARE > system.f_bavail * system.f_frsize:
        raise OSError(f"no room for {size >> 20} MiB")
    parts: list[Part] = []
    for what, block in blocks:
        stop = parts[-1].start + parts[-1].size if parts else 0
        parts.append(Part(what, -(-stop // ALIGNMENT) * ALIGNMENT, block.nbytes))
    part = folder / f"{path.stem}.{os.getpid()}-{os.urandom(4).hex()}.part"
    try:
        with part.open("xb", buffering=0) as file:
            sums: list[int] = []
            for piece in _pieces([block for _, block in blocks]):
                sums.append(checksum(piece))
                _write_all(file, piece)
                progress(min(len(sums) * LARGE, size), size)
            text = json.dumps([parts, sums]).encode()
            digest = hashlib.sha256(text).digest()
            _write_all(file, text + TRAILER.pack(len(text), digest, MAGIC))
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _pieces(blocks: Sequence[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """All blocks, each aligned, in whole large pages."""
    buffer = np.zeros(LARGE, np.uint8)
    used = 0
    for block in blocks:
        used += -used % ALIGNMENT
        at = 0
        while at < block.nbytes:
            if used == LARGE:
                yield buffer
                buffer[:] = 0
                used = 0
            count = min(LARGE - used, block.nbytes - at)
            buffer[used : used + count] = block[at : at + count]
            used, at = used + count, at + count
    yield buffer


def _write_all(file: Any, data: bytes | NDArray[np.uint8]) -> None:
    view = memoryview(data if isinstance(data, bytes) else data.data)
    while view:
        view = view[file.write(view) :]


def tidy(path: Path) -> None:
    """Remove what was abandoned, and the longest unused over the budget."""
    left = BUDGET
    found = sorted(
        ((each.stat(), each) for each in path.parent.iterdir() if each != path),
        key=lambda pair: -pair[0].st_mtime_ns,
    )
    left -= path.stat().st_size
    for facts, each in found:
        if each.suffix == ".part":
            if time.time() - facts.st_mtime > ABANDONED_SECONDS:
                each.unlink(missing_ok=True)
        elif each.suffix == path.suffix:
            left -= facts.st_size
            if left < 0:
                each.unlink(missing_ok=True)
