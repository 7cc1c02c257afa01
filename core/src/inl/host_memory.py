"""Memory of this host for contents that are written once as a whole."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

HUGE: Final = 2 << 20
"""Bytes of a huge page, from which on it takes less time to get some."""


def empty(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return an array of a shape and a dtype of NumPy, whose values are not defined.

    Where Linux has huge pages, its first write takes a quarter of the time: NumPy asks
    for them from 4 MiB on, a block of a cache often has 2 MiB.
    """
    import numpy as np

    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
