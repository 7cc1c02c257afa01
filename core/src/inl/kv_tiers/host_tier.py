"""Blocks in host memory, the least recently used of which make room for others."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inl.kv.tier import Place
    from inl.spec.cache_layout import Parts


GROWTH: Final = 64 << 20
"""Bytes of blocks that are stored between two questions of ``may_grow``."""


BURST: Final = 4 << 30
"""Bytes that a tier whose size no option sets may allocate at once."""

RATE: Final = 256 << 20
"""Bytes that it may allocate per second after that.

A new page takes longer than the copy of its contents, and on a GPU locking it delays
launches. An engine that evicts 3 GB in each second would wait for pages until all of
the memory is mapped; blocks that come sooner take the place of the oldest ones.
"""


class PacedGrowth:
    """Rate limit for ``may_grow`` of a tier: a token bucket, while ``has_room``.

    clock: returns seconds.
    """

    def __init__(
        self,
        has_room: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._has_room, self._clock = has_room, clock
        self._allowed, self._since = float(BURST), clock()

    def __call__(self) -> bool:
        """Whether :data:`GROWTH` bytes more may be used, which count as used then."""
        now = self._clock()
        allowed = self._allowed + RATE * (now - self._since)
        self._allowed, self._since = min(allowed, BURST), now
        if self._allowed < GROWTH or not self._has_room():
            return False
        self._allowed -= GROWTH
        return True


class HostTier:
    """Contents of blocks, ``capacity`` bytes at most.

    may_grow: asked before more memory is used; while it returns ``False``, blocks are
    dropped instead. Nothing is allocated ahead.
    """

    def __init__(
        self, capacity: int, *, may_grow: Callable[[], bool] | None = None
    ) -> None:
        self.capacity = capacity
        self.used_bytes = 0
        self._may_grow = may_grow
        self._granted = capacity if may_grow is None else 0
        """Bytes that may be used so far."""
        self._unasked = GROWTH
        """Bytes that were stored since the last question."""
        self._blocks: OrderedDict[Place, Parts] = OrderedDict()

    def __contains__(self, place: Place) -> bool:
        return place in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, place: Place) -> Parts | None:
        """Return contents, which are now the most recently used ones."""
        parts = self._blocks.get(place)
        if parts is not None:
            self._blocks.move_to_end(place)
        return parts

    def put(self, place: Place, parts: Parts) -> Iterator[tuple[Place, Parts]]:
        """Add contents; yields those that have no room any more."""
        if place in self._blocks:
            self._blocks.move_to_end(place)
            return
        self._blocks[place] = parts
        self.used_bytes += nbytes(parts)
        self._grow(nbytes(parts))
        while self.used_bytes > self._granted:
            oldest, dropped = self._blocks.popitem(last=False)
            self.used_bytes -= nbytes(dropped)
            yield oldest, dropped

    def _grow(self, stored: int) -> None:
        """Ask for more memory if it is needed, once for each :data:`GROWTH` bytes."""
        if self._may_grow is None or self._granted == self.capacity:
            return
        self._unasked += stored
        if self._unasked >= GROWTH and self.used_bytes > self._granted:
            self._unasked = 0
            if self._may_grow():
                self._granted = min(self.used_bytes + GROWTH, self.capacity)

    def items(self) -> list[tuple[Place, Parts]]:
        """Return all contents, the least recently used first."""
        return list(self._blocks.items())

    def clear(self) -> None:
        """Drop all contents."""
        self._blocks.clear()
        self.used_bytes = 0


def nbytes(parts: Parts) -> int:
    """Return the size of contents in bytes."""
    return sum(part.data.nbytes for part in parts.values())
