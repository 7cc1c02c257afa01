"""File format of the weight cache: blocks, a description of them, and its digest.

The blocks come first and are written two mebibytes at a time, so that a file system
with huge pages maps them in huge pages; with small pages, weights are read a quarter
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

HUGE_PAGE: Final = 2 << 20
"""Bytes of a huge page."""
ALIGNMENT: Final = 64
TRAILER: Final = struct.Struct("<Q32s8s")
"""Length of the description in bytes, its SHA-256 digest, and the magic number."""
MAGIC: Final = b"INLTILE1"
BUDGET: Final = 8 << 30
"""Bytes that all files of a folder may take; the least recently used are evicted."""
RESERVE: Final = 1 << 30
"""Bytes that are left free on the disk."""
ABANDONED_SECONDS: Final = 3600
"""Age from which an unfinished file is taken to be abandoned."""
MADV_POPULATE_READ: Final = 22
"""``madvise`` advice of Linux 5.14: map all pages now."""
SMAPS: Final = Path("/proc/self/smaps_rollup")


class Damaged(Exception):
    """A file is incomplete or corrupted."""


class Part(NamedTuple):
    """One block of a file."""

    what: tuple[int, ...]
    """Signature that the block was written with."""
    start: int
    size: int


class CacheFile:
    """An open cache file, mapped if huge pages make that as fast as memory, else read.

    Raises :class:`Damaged`, or :class:`OSError` if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.parts, sums, size = _read_description(file)
            self._data = _load_blocks(file.fileno(), size)
            for number, total in enumerate(sums):
                start = number * HUGE_PAGE
                if checksum(self._data[start : start + HUGE_PAGE]) != total:
                    raise Damaged(f"damaged after byte {start}")
            with suppress(OSError):
                os.utime(path)  # records the last use, for eviction

    def view(self, part: Part) -> NDArray[np.uint8]:
        """The bytes of one part."""
        return self._data[part.start : part.start + part.size]


def checksum(piece: NDArray[np.uint8]) -> int:
    """Sum of 64-bit words; detects truncated, zeroed and flipped bytes."""
    return int(np.add.reduce(piece.view(np.uint64)))


def _read_description(file: Any) -> tuple[list[Part], list[int], int]:
    """Parts, the checksum of each huge page, and the bytes of all pages."""
    size = file.seek(0, os.SEEK_END)
    if size < TRAILER.size:
        raise Damaged(f"truncated at byte {size}")
    file.seek(size - TRAILER.size)
    length, digest, magic = TRAILER.unpack(file.read(TRAILER.size))
    begin = size - TRAILER.size - length
    if magic != MAGIC or begin < 0:
        raise Damaged("truncated, or not a weight cache file")
    file.seek(begin)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise Damaged("damaged in its description")
    described, sums = json.loads(text)
    parts = [Part(tuple(what), *place) for what, *place in described]
    if begin != len(sums) * HUGE_PAGE or parts[-1].start + parts[-1].size > begin:
        raise Damaged("truncated")
    return parts, sums, begin


def _load_blocks(descriptor: int, size: int) -> NDArray[np.uint8]:
    """Map the blocks if the system uses huge pages, else read them."""
    before = _huge_page_bytes()
    mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    with suppress(OSError, ValueError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
        mapped.madvise(MADV_POPULATE_READ)
    if _huge_page_bytes() - before >= size // 2:
        return np.frombuffer(mapped, np.uint8)
    mapped.close()
    memory = aligned(size)
    offset = 0
    while offset < size:
        count = os.preadv(descriptor, [memory[offset:].data], offset)
        if not count:
            raise Damaged(f"truncated at byte {offset}")
        offset += count
    return memory


def _huge_page_bytes() -> int:
    """Bytes of files that this process has mapped in huge pages."""
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
    if size > BUDGET or size + RESERVE > system.f_bavail * system.f_frsize:
        raise OSError(f"no room for {size >> 20} MiB")
    parts: list[Part] = []
    for what, block in blocks:
        end = parts[-1].start + parts[-1].size if parts else 0
        parts.append(Part(what, -(-end // ALIGNMENT) * ALIGNMENT, block.nbytes))
    partial = folder / f"{path.stem}.{os.getpid()}-{os.urandom(4).hex()}.part"
    try:
        with partial.open("xb", buffering=0) as file:
            sums: list[int] = []
            for piece in _pages([block for _, block in blocks]):
                sums.append(checksum(piece))
                _write_all(file, piece)
                progress(min(len(sums) * HUGE_PAGE, size), size)
            text = json.dumps([parts, sums]).encode()
            digest = hashlib.sha256(text).digest()
            _write_all(file, text + TRAILER.pack(len(text), digest, MAGIC))
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _pages(blocks: Sequence[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """All blocks, each aligned, in whole huge pages; the yielded buffer is reused."""
    page = np.zeros(HUGE_PAGE, np.uint8)
    used = 0
    for block in blocks:
        used += -used % ALIGNMENT
        offset = 0
        while offset < block.nbytes:
            if used == HUGE_PAGE:
                yield page
                page[:] = 0
                used = 0
            count = min(HUGE_PAGE - used, block.nbytes - offset)
            page[used : used + count] = block[offset : offset + count]
            used, offset = used + count, offset + count
    yield page


def _write_all(file: Any, data: bytes | NDArray[np.uint8]) -> None:
    view = memoryview(data if isinstance(data, bytes) else data.data)
    while view:
        view = view[file.write(view) :]


def evict(path: Path) -> None:
    """Remove abandoned files, and the least recently used beyond the budget.

    ``path`` itself is never removed.
    """
    files = sorted(
        ((each.stat(), each) for each in path.parent.iterdir() if each != path),
        key=lambda pair: -pair[0].st_mtime_ns,
    )
    remaining = BUDGET - path.stat().st_size
    for facts, each in files:
        if each.suffix == ".part":
            if time.time() - facts.st_mtime > ABANDONED_SECONDS:
                each.unlink(missing_ok=True)
        elif each.suffix == path.suffix:
            remaining -= facts.st_size
            if remaining < 0:
                each.unlink(missing_ok=True)
