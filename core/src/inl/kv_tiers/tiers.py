"""Tiers below the block pools: what is stored where, and whether reading it pays."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from inl.kv_tiers.host_tier import HostTier

if TYPE_CHECKING:
    from inl.kv.tier import Place
    from inl.kv_tiers.disk_tier import DiskTier
    from inl.spec.cache_layout import Parts

WEIGHT = 0.2
"""Weight of a measurement in the mean of those before."""

FORGOTTEN = 0.99
"""Factor of the cost of loading with each refusal."""


OnPlace = Callable[[int, bytes, str | None], None]
"""Called with the group and the key of a block, and the name of the tier that has it
now, if one has. On any thread; returns at once."""


class Costs:
    """Measured seconds to compute a token of a prompt, and to load a block of a tier.

    Loading pays until both are known.
    """

    def __init__(self) -> None:
        self._token_seconds: float | None = None
        self._block_seconds: dict[str, float] = {}

    def relative(self, tier: str, tokens: float) -> float | None:
        """Return the time to load a block by that to compute ``tokens``, if known."""
        seconds = self._block_seconds.get(tier)
        if seconds is None or self._token_seconds is None:
            return None
        return seconds / (self._token_seconds * tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """Record a step of prompts."""
        self._token_seconds = _mean(self._token_seconds, seconds / tokens)

    def loaded(self, tier: str, blocks: int, seconds: float) -> None:
        """Record that blocks were read, checked and written to the device."""
        before = self._block_seconds.get(tier)
        self._block_seconds[tier] = _mean(before, seconds / blocks)

    def pays(self, blocks: Mapping[str, int], tokens: int) -> bool:
        """Whether blocks of each tier are loaded faster than tokens are computed.

        Each refusal lowers the cost of loading a little, so that it is measured again.
        """
        known = self._block_seconds
        if self._token_seconds is None or not known.keys() >= blocks.keys():
            return True
        seconds = sum(known[tier] * count for tier, count in blocks.items())
        if seconds < self._token_seconds * tokens:
            return True
        for tier in blocks:
            known[tier] *= FORGOTTEN
        return False


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)


class BlockTiers:
    """Host memory, then files: a :class:`~inl.kv.tier.Tier`.

    Blocks that have no room in memory are written to files; a block that is read from a
    file is in memory afterwards. host_bytes, may_grow: of
    :class:`~inl.kv_tiers.host_tier.HostTier`.
    """

    def __init__(
        self,
        costs: Costs,
        *,
        host_bytes: int = 0,
        may_grow: Callable[[], bool] | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self.costs = costs
        self.host, self.disk = HostTier(host_bytes, may_grow=may_grow), disk
        self.hits: Counter[str] = Counter()
        """Blocks that were loaded from "host" and "disk"."""
        self.generation = 0
        """Times that all blocks were dropped."""
        self.on_place: OnPlace | None = None
        if disk is not None:
            disk.on_drop = self._tell
        self._fetched: dict[Place, tuple[str, Parts]] = {}
        self._taken: Counter[str] = Counter()
        """Blocks of each tier that were taken since the last call of :meth:`loaded`."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Time to fetch them."""

    def holds(self, group: int, key: bytes) -> bool:
        """Whether a tier has the block."""
        place = group, key
        if place in self._fetched or place in self.host:
            return True
        return self.disk is not None and place in self.disk

    def is_worth(self, places: Sequence[Place], tokens: int) -> bool:
        """Whether loading blocks takes less time than computing tokens."""
        return self.costs.pays(Counter(map(self._tier_of, places)), tokens)

    def _tier_of(self, place: Place) -> str:
        fetched = self._fetched.get(place)
        if fetched is not None:
            return fetched[0]
        return "host" if place in self.host else "disk"

    def fetch(self, places: Sequence[Place]) -> bool:
        """Read contents and keep them for :meth:`take`; files several at a time."""
        lacking = [place for place in places if place not in self._fetched]
        for place in lacking:
            if (parts := self.host.get(place)) is not None:
                self._fetched[place] = "host", parts
        lacking = [place for place in lacking if place not in self._fetched]
        if not lacking:
            return True
        if self.disk is None:
            return False
        started = time.perf_counter()
        for place, found in zip(lacking, self.disk.get_all(lacking), strict=True):
            if found is not None:
                self._fetched[place] = "disk", found
        self._seconds["disk"] += time.perf_counter() - started
        return all(place in self._fetched for place in lacking)

    def take(self, group: int, key: bytes) -> Parts:
        """Return fetched contents, which go to the device now."""
        tier, parts = self._fetched.pop((group, key))
        self.hits[tier] += 1
        self._taken[tier] += 1
        self._put((group, key), parts)
        return parts

    def loaded(self, seconds: float) -> None:
        """Record the time to write the taken blocks; drop what else was fetched."""
        total = self._taken.total()
        for tier, blocks in self._taken.items():
            share = seconds * blocks / total
            self.costs.loaded(tier, blocks, share + self._seconds[tier])
        self._taken.clear()
        self._seconds.clear()
        self._fetched.clear()

    def store(self, group: int, key: bytes, parts: Parts) -> None:
        """Store contents of a block that the device has evicted."""
        self._put((group, key), parts)

    def _put(self, place: Place, parts: Parts) -> None:
        for other, dropped in self.host.put(place, parts):
            if self.disk is not None:
                self.disk.put(other, dropped)
            self._tell(other)
        self._tell(place)

    def _tell(self, place: Place) -> None:
        """Report where a block is now, on the thread that has moved it."""
        if self.on_place is not None:
            is_stored = place in self.host
            if not is_stored and self.disk is not None:
                is_stored = place in self.disk
            self.on_place(*place, self._tier_of(place) if is_stored else None)

    def forget_fetched(self) -> None:
        """Drop what was fetched for steps that are not submitted any more."""
        self._fetched.clear()

    def clear(self) -> None:
        """Drop all blocks, those in files too."""
        self.generation += 1
        self._fetched.clear()
        self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def flush(self) -> None:
        """Write all blocks in memory to files, if there are any."""
        if self.disk is None:
            return
        for place, parts in self.host.items():
            self.disk.put(place, parts, waits=True)
        self.disk.flush()

    def close(self) -> None:
        """Drop all blocks in memory and leave the files; closing twice is allowed."""
        self.forget_fetched()
        self.host.clear()
        if self.disk is not None:
            self.disk.close()
