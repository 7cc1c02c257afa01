"""Allocations of a device that report how much did not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from inl.backend.base import DeviceMemory
from inl.errors import OutOfMemory


@contextmanager
def allocating(
    nbytes: int,
    where: str,
    memory: Callable[[], DeviceMemory],
    is_oom: Callable[[Exception], bool],
    advice: str = "",
) -> Iterator[None]:
    """Raise :class:`OutOfMemory` for an allocation of ``nbytes`` that fails.

    where: start of the message. memory: returns the free bytes. is_oom: whether the
    framework reports with an error that memory is exhausted. advice: what was
    allocated, or what to change; ends in "; ".
    """
    try:
        yield
    except Exception as error:
        if not is_oom(error) and not isinstance(error, MemoryError):
            raise
        raise OutOfMemory(
            f"{where}: {nbytes} bytes ({nbytes / 2**20:.1f} MiB) do not fit, "
            f"{memory().free} bytes are free; {advice}lower cache_bytes, max_batch "
            "or context, or take a smaller dtype or model"
        ) from error
