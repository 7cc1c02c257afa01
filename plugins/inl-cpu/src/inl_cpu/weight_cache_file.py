"""File format of the weight cache: blocks, a description of them, and its signature.

The blocks come first and are written two mebibytes at a time, so that a file system
with huge pages maps them in huge pages; with small pages, weights are read a quarter
slower. The description has a keyed digest of the blocks and is signed with the same
key, which the folder holds: a file is used only if this folder's owner wrote it under
this name, and no bit of it has changed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import numpy as np

from inl.cache_dir.private_folder import PrivateFolder, signature
from inl_cpu.memory import aligned

if TYPE_CHECKING:
    from numpy.typing import NDArray

HUGE_PAGE: Final = 2 << 20
"""Bytes of a huge page."""
ALIGNMENT: Final = 64
TRAILER: Final = struct.Struct("<Q32s8s")
"""Length of the description in bytes, its signature, and the magic number."""
MAGIC: Final = b"INLTILE3"
MAX_DESCRIPTION: Final = 16 << 20
KEY_WORDS: Final = 1024
"""32-bit words of the key of CHECKSUM."""
MADV_POPULATE_READ: Final = 22
"""``madvise`` advice of Linux 5.14: map all pages now."""
SMAPS: Final = Path("/proc/self/smaps_rollup")

Checksums = Callable[["NDArray[np.uint8]", "NDArray[np.uint32]"], "NDArray[np.uint64]"]
"""Keyed checksums of each 4096 bytes: the instruction CHECKSUM."""
Block = tuple[tuple[int, ...], "NDArray[np.uint8]"]
"""A signature and its block."""


class Damaged(Exception):
    """A file is incomplete, corrupted, or was not written by this folder's owner."""


class Part(NamedTuple):
    """One block of a file."""

    what: tuple[int, ...]
    """Signature that the block was written with."""
    start: int
    size: int


class BlocksDigest:
    """Keyed digest of the blocks, which are added in order."""

    def __init__(self, key: bytes, checksums: Checksums) -> None:
        words = hashlib.shake_256(key + b"checksums").digest(4 * KEY_WORDS)
        self._words = np.frombuffer(words, np.uint32)
        self._digest = hashlib.blake2b(key=key, digest_size=32)
        self._checksums = checksums

    def add(self, data: NDArray[np.uint8]) -> None:
        """Add whole huge pages."""
        self._digest.update(self._checksums(data, self._words).data)

    def hexdigest(self) -> str:
        """Digest of all blocks."""
        return self._digest.hexdigest()


class CacheFile:
    """An open cache file, mapped if huge pages make that as fast as memory, else read.

    Raises :class:`Damaged`, :class:`~inl.cache_dir.private_folder.Untrusted`, or
    :class:`OSError` if it cannot be opened.
    """

    def __init__(self, folder: PrivateFolder, name: str, checksums: Checksums) -> None:
        with folder.open(name) as file:
            key = folder.key()
            self.parts, size, digest = _read_description(file, name, key)
            self._data = _load_blocks(file.fileno(), size)
            blocks = BlocksDigest(key, checksums)
            blocks.add(self._data)
            if not hmac.compare_digest(blocks.hexdigest(), digest):
                raise Damaged("damaged in its blocks")
            with suppress(OSError):
                os.utime(file.fileno())  # records the last use, for eviction

    def view(self, part: Part) -> NDArray[np.uint8]:
        """The bytes of one part."""
        return self._data[part.start : part.start + part.size]


def _read_description(
    file: BinaryIO, name: str, key: bytes
) -> tuple[list[Part], int, str]:
    """Parts, the bytes of all blocks, and their digest."""
    size = file.seek(0, os.SEEK_END)
    if size < TRAILER.size:
        raise Damaged(f"truncated at byte {size}")
    length, signed, magic = TRAILER.unpack(_read_at(file, size - TRAILER.size, size))
    end = size - TRAILER.size
    if magic != MAGIC or not 0 < length <= min(end, MAX_DESCRIPTION):
        raise Damaged("truncated, or not a weight cache file of this version")
    text = _read_at(file, end - length, end)
    if not hmac.compare_digest(signed, signature(key, name.encode(), text)):
        raise Damaged("damaged in its description, or not written for this place")
    return _parsed(text, end - length)


def _read_at(file: BinaryIO, start: int, stop: int) -> bytes:
    file.seek(start)
    data = file.read(stop - start)
    if len(data) != stop - start:
        raise Damaged(f"truncated at byte {start + len(data)}")
    return data


def _parsed(text: bytes, size: int) -> tuple[list[Part], int, str]:
    """Check the bounds of all parts of a description."""
    try:
        described, digest = json.loads(text)
        parts = [Part(tuple(what), *place) for what, *place in described]
        end = 0
        for part in parts:
            if part.start < end or part.start % ALIGNMENT or part.size < 1:
                raise ValueError
            end = part.start + part.size
        if not parts or size != -(-end // HUGE_PAGE) * HUGE_PAGE:
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise Damaged("its description is invalid") from None
    return parts, size, str(digest)


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
    folder: PrivateFolder,
    name: str,
    blocks: Sequence[Block],
    checksums: Checksums,
) -> None:
    """Write (signature, block) pairs atomically; raises OSError."""
    key = folder.key()

    def pieces() -> Iterator[memoryview | bytes]:
        digest = BlocksDigest(key, checksums)
        for page in _pages([block for _, block in blocks]):
            digest.add(page)
            yield page.data
        text = json.dumps([_parts(blocks), digest.hexdigest()]).encode()
        signed = signature(key, name.encode(), text)
        yield text + TRAILER.pack(len(text), signed, MAGIC)

    folder.write(name, pieces())


def bytes_of(blocks: Sequence[Block]) -> int:
    """Bytes of all blocks in their file, in whole huge pages."""
    last = _parts(blocks)[-1]
    return -(-(last.start + last.size) // HUGE_PAGE) * HUGE_PAGE


def _parts(blocks: Sequence[Block]) -> list[Part]:
    parts: list[Part] = []
    for what, block in blocks:
        end = parts[-1].start + parts[-1].size if parts else 0
        parts.append(Part(what, -(-end // ALIGNMENT) * ALIGNMENT, block.nbytes))
    return parts


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
