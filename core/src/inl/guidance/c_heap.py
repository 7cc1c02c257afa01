"""Bytes that native libraries have allocated, as glibc counts them."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


class _Counts(ctypes.Structure):
    """``struct mallinfo2``, of all arenas together."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                     "fsmblks", "uordblks", "fordblks", "keepcost")
    ]  # fmt: skip


def allocated_bytes() -> int:
    """Return the bytes that the process has allocated; 0 where it is unknown."""
    with suppress(AttributeError, OSError):
        function = _library().mallinfo2
        function.restype = _Counts
        counts = function()
        return int(counts.uordblks + counts.hblkhd)
    return 0


def return_free_memory() -> None:
    """Return freed memory to the system, which the C library keeps for later use."""
    with suppress(AttributeError, OSError):
        _library().malloc_trim(ctypes.c_size_t(0))


def _library() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise OSError("its C library is not glibc")
    return ctypes.CDLL(None)
