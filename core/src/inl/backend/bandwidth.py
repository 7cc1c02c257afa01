"""Memory bandwidth measurement."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from inl.backend.host import host_memory
from inl.device import DeviceType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.backend.base import Backend

HOST_TYPES = (DeviceType.CPU, DeviceType.REFERENCE)
"""Device types whose memory is the host's."""
MOST_BYTES = 256 << 20
"""Size of the buffer, larger than any cache."""
TRIES = 3


class Bandwidth(ABC):
    """Capability of a backend that can measure its memory bandwidth."""

    @abstractmethod
    def bytes_per_second(self) -> float:
        """Measure in well under a second and return the best of a few runs."""


class MeasuredBandwidth(NamedTuple):
    """A measured bandwidth and the method."""

    bytes_per_second: float
    how: str


def memory_bandwidth(backend: Backend) -> MeasuredBandwidth | None:
    """Measure the memory of a backend's device.

    Returns ``None`` if the backend has no :class:`Bandwidth` and its memory is not the
    host's.
    """
    capability = backend.offers(Bandwidth)  # type: ignore[type-abstract]
    if capability is not None:
        return MeasuredBandwidth(
            capability.bytes_per_second(), f"measured by {backend.device}"
        )
    if backend.device.type in HOST_TYPES:
        return host_bandwidth()
    return None


def host_bandwidth(size: int | None = None) -> MeasuredBandwidth:
    """Measure host memory with NumPy reads and copies on 1, 2, 4 ... threads.

    size: bytes of the buffer. Returns the highest bandwidth; a copy moves every byte
    twice.
    """
    import numpy as np

    size = size or min(MOST_BYTES, host_memory().free // 8)
    source = np.ones(max(size // 8, 64), np.int64)
    target = np.empty_like(source)

    def copy(part: slice) -> None:
        np.copyto(target[part], source[part])

    def read(part: slice) -> None:
        np.bitwise_or.reduce(source[part])

    results: list[MeasuredBandwidth] = []
    for count in _thread_counts(os.cpu_count() or 1):
        for name, work, times in (("read", read, 1), ("copy", copy, 2)):
            seconds = _fastest(work, source, count)
            speed = times * source.nbytes / seconds
            threads = "1 thread" if count == 1 else f"{count} threads"
            results.append(MeasuredBandwidth(speed, f"NumPy {name}, {threads}"))
    return max(results)


def _thread_counts(cores: int) -> list[int]:
    counts = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return [*counts, cores]


def _fastest(
    work: Callable[[slice], None], source: NDArray[np.int64], threads: int
) -> float:
    """Return the seconds of the best run, with threads already started."""
    size = -(-len(source) // threads)
    parts = [slice(at, at + size) for at in range(0, len(source), size)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, parts))
        for _ in range(TRIES):
            began = time.perf_counter()
            list(pool.map(work, parts))
            best = min(best, time.perf_counter() - began)
    return best
