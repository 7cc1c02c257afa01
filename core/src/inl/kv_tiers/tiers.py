"""Tiers below the block pools: what is stored where, and whether reading it pays."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from inl.kv_tiers.host_tier import HostTier

if TYPE_CHECKING:
    from inl.kv_tiers.disk_tier import DiskTier
    from inl.kv_tiers.host_tier import Place
    from inl.spec.cache_layout import Parts

WEIGHT = 0.2
"""Weight of a measurement in the mean of those before."""

FORGOTTEN = 0.99
"""Factor of the cost of loading with each refusal."""


class Costs:
    """Measured seconds to compute a token of a prompt, and to load a block.

    Loading pays until both are known.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._token_seconds: float | None = None
        self._block_seconds: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a step of prompts."""
        self._token_seconds = _mean(self._token_seconds, seconds / tokens)

    def loaded(self, blocks: int, seconds: float) -> None:
        """Record that blocks were read, checked and written to the device."""
        self._block_seconds = _mean(self._block_seconds, seconds / blocks)

    def pays(self) -> bool:
        """Whether a block is loaded faster than it is computed.

        Each refusal lowers the cost of loading a little, so that it is measured again.
        """
        if self._token_seconds is None or self._block_seconds is None:
            return True
        if self._block_seconds < self._token_seconds * self._block_size:
            return True
        self._block_seconds *= FORGOTTEN
        return False


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)


class BlockTiers:
    """Host memory, then files: a :class:`~inl.kv.tier.Tier`.

    Blocks that have no room in memory are written to files; a block that is read from a
    file is in memory afterwards.
    """

    def __init__(
        self, costs: Costs, *, host_bytes: int = 0, disk: DiskTier | None = None
    ) -> None:
        self.costs = costs
        self.host, self.disk = HostTier(host_bytes), disk
        self.hits: Counter[str] = Counter()
        """Blocks that were loaded from "host" and "disk"."""
        self._fetched: dict[Place, tuple[str, Parts]] = {}
        self._seconds = 0.0
        """Time to fetch what was not loaded yet."""

    def holds(self, group: int, key: bytes) -> bool:
        """Whether a tier has the block."""
        place = group, key
        if place in self._fetched or place in self.host:
            return True
        return self.disk is not None and place in self.disk

    def is_worth(self, blocks: int) -> bool:  # noqa: ARG002 - costs are per block
        """Whether loading takes less time than computing."""
        return self.costs.pays()

    def fetch(self, group: int, key: bytes) -> bool:
        """Read contents and keep them for :meth:`take`."""
        place = group, key
        if place in self._fetched:
            return True
        started = time.perf_counter()
        tier, parts = "host", self.host.get(place)
        if parts is None and self.disk is not None:
            tier, parts = "disk", self.disk.get(place)
        self._seconds += time.perf_counter() - started
        if parts is None:
            return False
        self._fetched[place] = tier, parts
        return True

    def take(self, group: int, key: bytes) -> Parts:
        """Return fetched contents, which go to the device now."""
        tier, parts = self._fetched.pop((group, key))
        self.hits[tier] += 1
        self._put((group, key), parts)
        return parts

    def loaded(self, blocks: int, seconds: float) -> None:
        """Record the time to write fetched blocks; drop what else was fetched."""
        if blocks:
            self.costs.loaded(blocks, seconds + self._seconds)
        self._seconds = 0.0
        self._fetched.clear()

    def store(self, group: int, key: bytes, parts: Parts) -> None:
        """Store contents of a block that the device has evicted."""
        self._put((group, key), parts)

    def _put(self, place: Place, parts: Parts) -> None:
        for other, dropped in self.host.put(place, parts):
            if self.disk is not None:
                self.disk.put(other, dropped)

    def forget_fetched(self) -> None:
        """Drop what was fetched for steps that are not submitted any more."""
        self._fetched.clear()

    def clear(self) -> None:
        """Drop all blocks, those in files too."""
        self._fetched.clear()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def flush(self) -> None:
        """Write all blocks in memory to files, if there are any."""
        if self.disk is None:
            return
        for place, parts in self.host.items():
            self.disk.put(place, parts)
        self.disk.flush()

    def close(self) -> None:
        """Drop all blocks in memory and leave the files; closing twice is allowed."""
        self.forget_fetched()
        self.host.clear()
        if self.disk is not None:
            self.disk.close()
