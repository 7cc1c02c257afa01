"""What the scheduler knows of snapshots: copies of recurrent state at block borders.

A prefix of a model with recurrent state can be shared up to a border for which the
pools have the blocks and there is a snapshot. Both have the same key, that of the last
block before the border.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from inl.scheduling.request import Request


class SnapshotIndex(Protocol):
    """Finds snapshots by prefix-cache key."""

    def holds(self, key: bytes) -> bool:
        """Whether there is a snapshot of the state after the block with this key."""

    def clear(self) -> None:
        """Drop all snapshots."""


class Snapshot(NamedTuple):
    """State to read after a step."""

    request: Request
    slot: int
    """Its slot in the step."""
    stop: int
    """Tokens that have changed the state, a multiple of the block size."""


class Restore(NamedTuple):
    """State to write before a step, of a request that shares leading blocks."""

    slot: int
    key: bytes
