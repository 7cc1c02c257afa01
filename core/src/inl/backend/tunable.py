"""Capability of backends with tunable kernels."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.kernel import Kernel
    from inl.spec.workload import Config

MIN_SECONDS = 2e-3
"""Shortest duration that the host clock measures reliably."""
ROUNDS = 7


class Facts(NamedTuple):
    """Environment of a measurement; a change of any field invalidates it."""

    device: str
    """Product name of the device."""
    driver: str
    compiler: str
    plugin: str
    """Distribution name and version."""


class Tunable(ABC):
    """Capability: kernels with tunable parameters, measured by ``inl tune``.

    The empty :data:`~inl.spec.workload.Config` is the kernel in the backend's own list;
    the search space need not contain it.
    """

    cache_bytes: int = 64 << 20
    """Size of the last-level cache; measured inputs rotate past it."""

    @abstractmethod
    def facts(self) -> Facts:
        """Return the environment of measurements, without importing new frameworks."""

    @abstractmethod
    def search_space(
        self, op: str, *specs: Any, **attrs: Any
    ) -> Sequence[Sequence[Config]]:
        """Return the configs to try for a call of ``op``, one sequence per axis.

        A config combines one entry of each axis; axes are searched in order. Empty if
        there is nothing to tune.
        """

    @abstractmethod
    def kernel(self, op: str, config: Config) -> Kernel:
        """Return the kernel of ``op`` with this config.

        Raises :class:`~inl.errors.RequestError` for an unknown config.
        """

    def seconds(self, backend: Backend, calls: Sequence[Callable[[], Any]]) -> float:
        """Return the seconds of one call: the median of several rounds over all calls.

        The calls differ only in their inputs. Measures with the host clock until the
        last result has been fetched; backends with device timers should override it.
        """

        def once(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                for call in calls:
                    result = call()
            for leaf in leaves(result):
                backend.numpy(leaf)
                break
            return (time.perf_counter() - began) / (count * len(calls))

        first = once(1)
        repeats = MIN_SECONDS / (max(once(1), 1e-9) * len(calls))
        count = max(1, min(1000, int(repeats)))
        rounds = 1 if first > 1 else ROUNDS
        return float(np.median([once(count) for _ in range(rounds)]))
