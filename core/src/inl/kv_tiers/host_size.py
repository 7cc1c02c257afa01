"""How much host memory blocks take where no option says it."""

from __future__ import annotations

from typing import Final

from inl.backend.host import host_memory

SHARE: Final = 4
"""Divisor of the free host memory."""

MOST_CACHES: Final = 4
"""Most bytes, as multiples of the device's cache."""

LEAST_BYTES: Final = 256 << 20
"""Fewer bytes are not used: they hold a few thousand tokens of a small model."""


def free_bytes() -> int:
    """Return the free host memory in bytes."""
    return host_memory().free


def automatic_bytes(
    free: int, cache: int, *, is_shared: bool = False, budget: int | None = None
) -> int:
    """Return the bytes of host memory for evicted blocks, 0 for none.

    A quarter of ``free``, the free host memory in bytes, and at most 4 times ``cache``,
    the bytes of the device's cache. is_shared: whether that is host memory too. Cache
    and blocks then have ``budget`` bytes together, by default that quarter: a copy in
    the same memory is of use only where the cache is smaller than its budget because of
    the maximum batch.
    """
    size = free // SHARE
    if is_shared:
        size = (size if budget is None else budget) - cache
    size = min(size, MOST_CACHES * cache)
    return size if size >= LEAST_BYTES else 0
