"""Blocks in host memory, the least recently used of which make room for others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inl.kv.tier import Place
    from inl.spec.cache_layout import Parts


GROWTH: Final = 64 << 20
"""Bytes of blocks that are stored between two questions of ``may_grow``."""


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
