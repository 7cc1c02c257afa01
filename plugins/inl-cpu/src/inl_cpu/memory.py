"""Host memory for tensors: aligned, and used again while a program is recorded."""

from __future__ import annotations

import mmap
from collections import defaultdict
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inl_cpu.nodes import spread

Floats = NDArray[np.float32]
ALIGNMENT: Final = 64
SPREAD: Final = 1 << 20
"""Bytes from which an array is mapped by itself, not yet touched."""
SMALLEST: Final = 1024
"""Bytes of the smallest block of scratch."""


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Fresh bytes, not zeroed, that begin at a cache line."""
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address(whole) % ALIGNMENT
    return whole[start : start + nbytes]


def empty(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """A fresh aligned array, not filled."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    found: NDArray[Any] = aligned(size).view(kind).reshape(shape)
    return found


def address(array: NDArray[Any]) -> int:
    """Where an array's first element lies."""
    found: int = array.__array_interface__["data"][0]
    return found


def zeros(nbytes: int) -> NDArray[np.uint8]:
    """Aligned bytes, all zero; pages that nobody touches take no memory.

    Large ones are spread over the nodes of a machine that has several.
    """
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
    if nbytes >= SPREAD:
        spread(address(whole), whole.nbytes)
    start = -address(whole) % ALIGNMENT
    return whole[start : start + nbytes]


def sparse_zeros(nbytes: int) -> NDArray[np.uint8]:
    """Aligned bytes, all zero, for what is filled here and there: in small pages.

    A large page is taken whole for its first byte. Raises :class:`MemoryError`.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, nbytes + ALIGNMENT, private)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{nbytes} bytes") from error
    with suppress(OSError, AttributeError):  # not every system has large pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:nbytes]


class Slab:
    """Cuts what is asked for out of few large zeroed arrays.

    The system backs those with huge pages; with one small array a matrix, looking
    their addresses up makes decoding three times slower.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Aligned bytes, all zero, that are given back with the whole slab."""
        if nbytes > self._free.nbytes:
            self._free = zeros(max(nbytes, self._size))
        found = self._free[:nbytes]
        self._free = self._free[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
        return found


class Scratch:
    """Blocks that all programs of a backend compute in, one program at a time."""

    def __init__(self) -> None:
        self._slab = Slab(4 << 20)
        self._blocks: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def block(self, size: int, place: int) -> NDArray[np.uint8]:
        """The ``place``-th block of ``size`` bytes; made where there is none yet."""
        blocks = self._blocks[size]
        while len(blocks) <= place:
            blocks.append(self._slab.take(size))
        return blocks[place]


class Arena:
    """Lends the blocks of a :class:`Scratch` to one program while it is recorded.

    A tensor's block is lent again once nothing in Python refers to the tensor: what
    is recorded after that point may overwrite it.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._used: dict[int, int] = defaultdict(int)
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self.blocks: list[NDArray[np.uint8]] = []
        """Every block that the program computes in."""
        self._lent = 0

    def lend(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """An array whose ultimate base is a :class:`Lease`."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        size = SMALLEST
        while size < nbytes:
            size *= 2
        self._lent += 1
        lease = Lease(self, self._block(size), self._lent)
        found: NDArray[Any] = np.asarray(lease)[:nbytes].view(kind).reshape(shape)
        return found

    def _block(self, size: int) -> NDArray[np.uint8]:
        if self._free[size]:
            return self._free[size].pop()
        block = self._scratch.block(size, self._used[size])
        self._used[size] += 1
        self.blocks.append(block)
        return block

    def take_back(self, block: NDArray[np.uint8]) -> None:
        """Lend a block again."""
        self._free[block.nbytes].append(block)


class Lease:
    """A block on loan to one tensor and its views; ends with the last of them."""

    def __init__(self, arena: Arena, block: NDArray[np.uint8], number: int) -> None:
        self._arena, self._block = arena, block
        self.number = number
        """Which loan of the program this is, from 1."""
        self.address = address(block)
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._arena.take_back(self._block)


def lease_of(array: NDArray[Any]) -> Lease | None:
    """The loan that an array lies in; ``None`` for memory that lasts."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, Lease) else None
