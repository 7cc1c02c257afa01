"""Digests of contents, whose parts are hashed at the same time.

One thread hashes less than memory or a network carries.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from typing import Final

Piece = bytes | bytearray | memoryview

PART: Final = 4 << 20
"""Bytes of a part, each of which has a digest of its own."""

THREADS: Final = min(os.cpu_count() or 1, 8)


def digest(pieces: Iterable[Piece]) -> bytes:
    """Return the SHA-256 of the SHA-256 of each part of what pieces are together.

    Pieces are of bytes, and do not change before the return.
    """
    parts = list(_parts(pieces))
    # The threads of a parent process are not those of its child.
    each = map if len(parts) < 2 else _threads(os.getpid()).map
    return sha256(b"".join(each(_of, parts))).digest()


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
    found = sha256()
    for view in part:
        found.update(view)
    return found.digest()


@cache
def _threads(_: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="inl-digest")
