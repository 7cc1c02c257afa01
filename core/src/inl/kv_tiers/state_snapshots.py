"""Snapshots of recurrent state in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from inl.backend.host import host_memory
from inl.kv_tiers.host_tier import HostTier
from inl.spec.cache_layout import SLOT_GROUP

if TYPE_CHECKING:
    from inl.spec.cache_layout import Parts

MOST_AUTOMATIC, AUTOMATIC_SHARE = 8 << 30, 8
"""Bytes of all snapshots by default: this part of the free memory, up to the first."""


class StateSnapshots:
    """Contents of slots by prefix-cache key, ``capacity`` bytes at most.

    The least recently used make room for others: a
    :class:`~inl.kv.snapshots.SnapshotIndex`.
    """

    def __init__(self, capacity: int) -> None:
        self._host = HostTier(capacity)
        self.counts: Counter[str] = Counter()
        """Snapshots that were "taken", "restored", and "dropped" for want of room."""
        self.on_change: Callable[[bytes | None, bool], None] = lambda *_: None
        """Called with a key, and whether there is a snapshot of it now; ``None``: of
        none there is. On the thread that steps; returns at once."""

    def __len__(self) -> int:
        return len(self._host)

    @property
    def capacity(self) -> int:
        """Most bytes of all snapshots."""
        return self._host.capacity

    @property
    def used_bytes(self) -> int:
        """Bytes of all snapshots."""
        return self._host.used_bytes

    def holds(self, key: bytes) -> bool:
        """Whether there is a snapshot of the state after the block with this key."""
        return (SLOT_GROUP, key) in self._host

    def take(self, key: bytes) -> Parts:
        """Return a snapshot that :meth:`holds`, for a slot of the runner."""
        parts = self._host.get((SLOT_GROUP, key))
        assert parts is not None, "nothing is dropped between planning and submitting"
        self.counts["restored"] += 1
        return parts

    def put(self, key: bytes, parts: Parts) -> None:
        """Add a snapshot, whose arrays do not change."""
        is_new = not self.holds(key)
        dropped = [each for (_, each), _ in self._host.put((SLOT_GROUP, key), parts)]
        self.counts["taken"] += is_new
        self.counts["dropped"] += len(dropped)
        if is_new:
            self.on_change(key, True)
        for each in dropped:
            self.on_change(each, False)

    def clear(self) -> None:
        """Drop all snapshots."""
        self._host.clear()
        self.on_change(None, False)


def automatic_snapshot_bytes() -> int:
    """Return the bytes of all snapshots by default."""
    return min(host_memory().free // AUTOMATIC_SHARE, MOST_AUTOMATIC)
