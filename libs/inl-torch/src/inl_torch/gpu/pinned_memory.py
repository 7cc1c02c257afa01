"""Page-locked host memory for blocks, allocated ahead of its use and used again."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inl.backend.host import host_memory
from inl.errors import OutOfMemory
from inl_torch.memory import allocating

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Bytes = NDArray[np.uint8]

PIECE = 16 << 20
"""Bytes that are locked in one call, which delays the launches of other threads."""

THREADS = 2
"""Threads that allocate ahead: a new page takes longer than its copy."""

MOST_ARRAYS = 512
"""Arrays of one piece at most."""

AHEAD = 1 << 30
"""Free bytes up to which a thread allocates, but no more than are in use."""


class PinnedMemory:
    """Allocates arrays in page-locked memory. Thread-safe.

    Locking takes longer than copying does. The memory of an array to which nothing
    refers any more is used again, and threads allocate more before it is needed.
    allocate: returns a number of locked bytes.
    """

    def __init__(self, allocate: Callable[[int], Bytes]) -> None:
        self._allocate = allocate
        self._free: defaultdict[int, deque[Bytes]] = defaultdict(deque)
        """Free memory by its size in bytes."""
        self._total: Counter[int] = Counter()
        """Arrays of each size, free or not."""
        self._coming: Counter[int] = Counter()
        """Arrays of each size that threads allocate."""
        self._threads = 0
        self._lock = threading.Lock()
        """Held while one of these numbers changes."""
        self._waiting = threading.Lock()
        """Held by the caller that allocates what no thread has allocated."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocate an array; raises :class:`~inl.errors.OutOfMemory`."""
        kind = np.dtype(dtype)
        used = prod(shape) * kind.itemsize
        memory = self._take(max(used, 1))
        slot = np.asarray(_Slot(memory, self._free[len(memory)]))
        return slot[:used].view(kind).reshape(shape)

    def _take(self, size: int) -> Bytes:
        free = self._free[size]
        while True:
            try:
                memory = free.pop()
            except IndexError:
                with self._waiting:
                    if not free:
                        self._grow(size)
            else:
                self._grow_ahead(size)
                return memory

    def _grow_ahead(self, size: int) -> None:
        """Start threads that allocate, if much of the memory is in use."""
        while self._lacks(size):
            with self._lock:
                if self._threads == THREADS or not self._lacks(size):
                    return
                self._threads += 1
                self._coming[size] += arrays_of(size)
            threading.Thread(
                target=self._grow_behind, args=(size,), name="inl-pin", daemon=True
            ).start()

    def _lacks(self, size: int) -> bool:
        free = len(self._free[size])
        in_use = size * (self._total[size] - free)
        return size * (free + self._coming[size]) < min(AHEAD, in_use)

    def _grow_behind(self, size: int) -> None:
        try:
            self._grow(size)
        except OutOfMemory:
            return  # raised again where memory is needed
        finally:
            with self._lock:
                self._threads -= 1
                self._coming[size] -= arrays_of(size)
        self._grow_ahead(size)

    def _grow(self, size: int) -> None:
        count = arrays_of(size)
        with allocating(count * size, "pinned memory", host_memory):
            whole = self._allocate(count * size)
        with self._lock:
            self._total[size] += count
        self._free[size].extend(np.split(whole, count))


def arrays_of(size: int) -> int:
    """Return the number of arrays of a size that are allocated together."""
    return min(max(PIECE // size, 1), MOST_ARRAYS)


class _Slot:
    """Memory of one array, which is free again once nothing refers to it."""

    def __init__(self, memory: Bytes, free: deque[Bytes]) -> None:
        self._memory, self._free = memory, free
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)


def locked(place: torch.device, size: int) -> Bytes:
    """Allocate page-locked memory, or other memory where the system locks no more.

    Pages are touched before they are locked: that needs no lock of the driver.
    """
    try:
        pages = mmap.mmap(-1, size)
    except OSError as error:
        raise MemoryError(str(error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(pages, np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    with torch.cuda.device(place):  # a thread begins with another one
        code = int(runtime.cudaHostRegister(address, size, 0))
    if code == 0:
        release = weakref.finalize(memory, runtime.cudaHostUnregister, address)
        release.atexit = False
    return memory
