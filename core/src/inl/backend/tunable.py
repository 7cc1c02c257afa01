"""What a backend offers that has several ways to compute an op, to be measured."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.kernel import Kernel
    from inl.spec.workload import Config

LEAST_SECONDS = 2e-3
"""What a host's clock measures well."""
ROUNDS = 7


class Facts(NamedTuple):
    """What a measurement holds for; another value of any of them makes it void."""

    device: str
    """Name of the chip."""
    driver: str
    compiler: str
    plugin: str
    """Distribution and version."""


class Tunable(ABC):
    """A capability: kernels that may be cut in several ways.

    A way is a :data:`~inl.spec.workload.Config`; the empty one is the kernel as the
    backend itself lists it, and need not be offered.
    """

    cache_bytes: int = 64 << 20
    """Size of the last cache: inputs are rotated past it."""

    @abstractmethod
    def facts(self) -> Facts:
        """Say what results hold for; imports no framework that is not there yet."""

    @abstractmethod
    def search_space(
        self, op: str, *specs: Any, **attrs: Any
    ) -> Sequence[Sequence[Config]]:
        """Ways to try for a call of ``op`` on specs: of each axis one, axis by axis.

        Empty where there is nothing to choose.
        """

    @abstractmethod
    def kernel(self, op: str, config: Config) -> Kernel:
        """Make the kernel of ``op`` that is cut like this, ``config`` its own.

        Raises :class:`~inl.errors.RequestError` for a config that it does not know.
        """

    def seconds(self, backend: Backend, calls: Sequence[Callable[[], Any]]) -> float:
        """Time one call, the median of some rounds in which each has its turn.

        The calls differ in the inputs only. By the host's clock, ended by fetching the
        last result; a device with a clock of its own does better.
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
        wanted = LEAST_SECONDS / (max(once(1), 1e-9) * len(calls))
        count = max(1, min(1000, int(wanted)))
        rounds = 1 if first > 1 else ROUNDS
        return statistics.median(once(count) for _ in range(rounds))
