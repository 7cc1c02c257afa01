"""What the cache manager asks of tiers of storage below the device's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

Place = tuple[int, bytes]
"""Cache group and prefix-cache key."""


class BlockMove(NamedTuple):
    """A block whose contents are copied between the device and a tier."""

    group: int
    key: bytes
    block: int


class Tier(Protocol):
    """Stores contents of blocks by cache group and prefix-cache key."""

    def holds(self, group: int, key: bytes) -> bool:
        """Whether contents are stored, as far as is known without reading them."""

    def is_worth(self, places: Sequence[Place], tokens: int) -> bool:
        """Whether reading blocks takes less time than computing tokens."""

    def fetch(self, places: Sequence[Place]) -> bool:
        """Read and check contents, for a move to the device in the next step.

        ``False`` if some are damaged; they are not held any more then.
        """
