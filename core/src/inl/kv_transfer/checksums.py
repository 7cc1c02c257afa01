"""Checksums of contents, whose parts are read at the same time.

They find faults of memory, of transports and of networks, not forgeries: who may send
is proved by the secret of a link, and between hosts TLS protects what it carries. One
thread reads less than memory or a network carries.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from typing import Any, Final

Piece = bytes | bytearray | memoryview

PART: Final = 2 << 20
"""Bytes of a part, each of which has a CRC-32 of its own."""

THREADS: Final = min(os.cpu_count() or 1, 8)


def checksum(pieces: Iterable[Piece]) -> bytes:
    """Return the SHA-256 of the CRC-32 of each part of what pieces are together.

    Pieces are of bytes, and do not change before the return.
    """
    parts = list(_parts(pieces))
    return sha256(b"".join(each(len(parts))(_of, parts))).digest()


def each(count: int) -> Callable[..., Iterable[Any]]:
    """Return what calls a function ``count`` times, as ``map`` does, on threads."""
    # The threads of a parent process are not those of its child.
    return map if count < 2 else _threads(os.getpid()).map


def _parts(pieces: Iterable[Piece]) -> Iterator[list[memoryview]]:
    part: list[memoryview] = []
    room = PART
    for piece in pieces:
        view = memoryview(piece)
        while len(view) >= room:
            yield [*part, view[:room]]
            part, view, room = [], view[room:], PART
        part.append(view)
        room -= len(view)
    yield part


def _of(part: Sequence[memoryview]) -> bytes:
    found = 0
    for view in part:
        found = zlib.crc32(view, found)
    return found.to_bytes(4, "little")


@cache
def _threads(_: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="inl-contents")
