"""Host memory for tensors: aligned allocation, and scratch planning for programs."""

from __future__ import annotations

import mmap
import sys
import weakref
from collections import defaultdict
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inl_cpu.numa import interleave

Floats = NDArray[np.float32]
ALIGNMENT: Final = 64
INTERLEAVED: Final = 1 << 20
"""Bytes from which an allocation has pages of its own, not yet touched."""
SMALLEST: Final = 1024
"""Bytes of the smallest scratch block."""


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Allocate bytes at a cache line boundary, not initialized."""
    whole = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address(whole) % ALIGNMENT
    return whole[start : start + nbytes]


def empty(shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """Allocate an aligned array, not initialized."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    array: NDArray[Any] = aligned(size).view(kind).reshape(shape)
    return array


def address(array: NDArray[Any]) -> int:
    """Address of the first element of an array."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def zeros(nbytes: int) -> NDArray[np.uint8]:
    """Allocate aligned zero bytes; untouched pages take no memory.

    Large allocations are interleaved over the NUMA nodes.
    """
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
    if nbytes >= INTERLEAVED:
        interleave(address(whole), whole.nbytes)
    start = -address(whole) % ALIGNMENT
    return whole[start : start + nbytes]


def sparse_zeros(nbytes: int) -> NDArray[np.uint8]:
    """Allocate zero bytes in small pages, for memory that is filled sparsely.

    A huge page would be committed whole for its first byte. Raises
    :class:`MemoryError`.
    """
    try:
        if sys.platform == "win32":
            pages = mmap.mmap(-1, nbytes + ALIGNMENT)
        else:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = mmap.mmap(-1, nbytes + ALIGNMENT, private)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{nbytes} bytes") from error
    with suppress(OSError, AttributeError):  # systems without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:nbytes]


class Slab:
    """Bump allocator over a few large zeroed arrays; freed as a whole.

    The system backs large arrays with huge pages. With one small array for each matrix,
    TLB misses make decoding three times slower.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = np.empty(0, np.uint8)

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate aligned zero bytes."""
        if nbytes > self._free.nbytes:
            self._free = zeros(max(nbytes, self._size))
        block = self._free[:nbytes]
        self._free = self._free[-(-nbytes // ALIGNMENT) * ALIGNMENT :]
        return block


class Scratch:
    """Scratch blocks shared by a backend's programs, of which one runs at a time."""

    def __init__(self) -> None:
        self._slab = Slab(4 << 20)
        self._blocks: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def block(self, size: int, index: int) -> NDArray[np.uint8]:
        """Return block ``index`` of those of ``size`` bytes, allocated on first use."""
        blocks = self._blocks[size]
        while len(blocks) <= index:
            blocks.append(self._slab.allocate(size))
        return blocks[index]


class BufferPlanner:
    """Assigns scratch blocks to the tensors of one program while it is recorded.

    A block is free for reuse once no Python object refers to its tensor: instructions
    recorded after that point may overwrite it.

    A tensor may be freed anywhere. No Python code runs then, in which Ctrl-C would be
    swallowed, and the block lost: the callback of a weak reference is ``list.append``.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._used: dict[int, int] = defaultdict(int)
        self._free: dict[int, list[_Owner]] = defaultdict(list)
        """Owners that are gone, by the size of their blocks."""
        self._owners: dict[int, _Owner] = {}
        """The last owner of each block, by its address."""
        self.blocks: list[NDArray[np.uint8]] = []
        """Every block that the program uses."""
        self._count = 0

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array whose ultimate base is a :class:`BufferHandle`."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        size = SMALLEST
        while size < nbytes:
            size *= 2
        self._count += 1
        block = self._block(size)
        handle = BufferHandle(block, self._count)
        owner = _Owner(handle, self._free[size].append)
        owner.block = block
        self._owners[handle.address] = owner
        array: NDArray[Any] = np.asarray(handle)[:nbytes].view(kind).reshape(shape)
        return array

    def _block(self, size: int) -> NDArray[np.uint8]:
        free = self._free[size]
        while free:
            # ``None`` if the allocation was interrupted; its block is then not used.
            if (freed := free.pop().block) is not None:
                return freed
        block = self._scratch.block(size, self._used[size])
        self._used[size] += 1
        self.blocks.append(block)
        return block


class BufferHandle:
    """Owner of a scratch block for a tensor and its views, which is then free."""

    def __init__(self, block: NDArray[np.uint8], number: int) -> None:
        self.number = number
        """Number of this allocation in the program, from 1."""
        self.address = address(block)
        self.__array_interface__ = block.__array_interface__


class _Owner(weakref.ref[BufferHandle]):
    """The handle of a block, and the block."""

    block: NDArray[np.uint8] | None = None


def handle_of(array: NDArray[Any]) -> BufferHandle | None:
    """Return the scratch buffer of an array, or ``None`` for other memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, BufferHandle) else None
