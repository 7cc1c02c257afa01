"""Block tables of sequences over all cache groups, with delayed frees.

Steps in flight may still read or write a sequence's blocks on the device. Its blocks
are therefore freed only when the newest step that may touch them is collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from inl.kv.block_pool import BlockPool
from inl.kv.kv_events import BlocksCleared, BlocksRemoved, OnKVEvent
from inl.kv.snapshots import SnapshotIndex
from inl.kv.tier import BlockMove, Tier
from inl.spec.cache import passed_blocks

Table = list[list[int]]
"""[G][blocks]: the blocks of one sequence, in order, for each cache group."""


class KVCacheManager:
    """Allocates, shares and frees the blocks of sequences in every group's pool.

    windows: tokens that a query sees in each group, ``None`` for all. Blocks before a
    group's window may be freed early; the table then has block 0 in their place. tier:
    has contents of blocks that the pools have not. snapshots: of a model with recurrent
    state, a prefix of which is shared only up to one of them.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None] = (),
        *,
        tier: Tier | None = None,
        snapshots: SnapshotIndex | None = None,
    ) -> None:
        self.snapshots = snapshots
        self.pools = tuple(pools)
        self.windows = tuple(windows) or (None,) * len(self.pools)
        self.block_size = self.pools[0].block_size
        self._completed_step = 0
        self._pending_frees: dict[int, list[Table]] = {}
        self._tier = tier
        self._evicted: list[BlockMove] = []
        self._loaded: dict[tuple[int, int], bytes] = {}
        """Key of each block that the next step loads, by group and number."""
        self.on_event: OnKVEvent | None = None
        self.main_group = self.windows.index(None) if None in self.windows else 0
        self.last_loaded: Sequence[int] = ()
        """Indexes of blocks of the last admitted table that are loaded from the tier,
        in the group of the events."""
        for group, pool in enumerate(self.pools if tier else ()):
            pool.on_evict = partial(self._on_evict, group)

    def report(self, on_event: OnKVEvent) -> None:
        """Call ``on_event`` with what happens to the blocks of one group.

        It is the first one whose queries see all tokens, if there is such a group.
        """
        self.on_event = on_event
        self.pools[self.main_group].on_evict = partial(self._on_evict, self.main_group)

    @property
    def available_blocks(self) -> int:
        """Blocks that a sequence can still allocate, in the fullest group."""
        return min(pool.available_blocks for pool in self.pools)

    @property
    def has_pending_frees(self) -> bool:
        """Whether blocks wait for a step in flight before they are freed."""
        return bool(self._pending_frees)

    def admit(
        self,
        keys: Sequence[bytes],
        count: int,
        *,
        spare: int,
        recomputes_block: bool = False,
    ) -> tuple[Table, int] | None:
        """Allocate a table of ``count`` blocks and share its cached prefix.

        keys: prefix-cache keys of the leading blocks. Returns the table and the number
        of leading blocks that are shared: those that every group has cached, as far
        back as the group's window reaches. Returns ``None``, and allocates nothing,
        unless ``spare`` more blocks would remain available. recomputes_block: whether
        the last block of the longest cached prefix is not shared.
        """
        if self.available_blocks < count - len(keys) + spare:
            return None
        hits = self.restorable_prefix(keys)
        if recomputes_block and hits:
            hits = self.restorable_prefix(keys[: hits - 1])
        elif self._tier is not None:
            hits = self._stored_prefix(self._tier, keys, hits, count + spare)
        table, lacking = [], []
        for group, pool in enumerate(self.pools):
            first = self.before_window(group, hits * self.block_size)
            lacks = [at for at in range(first, hits) if pool.find(keys[at]) is None]
            lacking.append(lacks)
            blocks = [0] * hits
            for at in set(range(first, hits)).difference(lacks):
                blocks[at] = pool.share(keys[at])
            table.append(blocks)
        fresh = count - hits
        if self.available_blocks < fresh + max(map(len, lacking)) + spare:
            self._free(table)
            return None
        for group, (pool, blocks) in enumerate(zip(self.pools, table, strict=True)):
            for index in lacking[group]:
                blocks[index] = pool.allocate()
                self._loaded[group, blocks[index]] = keys[index]
                pool.publish(blocks[index], keys[index])
            blocks += pool.allocate_many(fresh)
        self.last_loaded = lacking[self.main_group]
        return table, hits

    def restorable_prefix(self, keys: Sequence[bytes]) -> int:
        """Longest cached prefix, in blocks, that a sequence can continue.

        With recurrent state it ends with a snapshot.
        """
        hits, snapshots = self.cached_prefix(keys), self.snapshots
        if snapshots is None:
            return hits
        for length in range(hits, 0, -1):
            if not snapshots.holds(keys[length - 1]):
                continue
            if length == hits or self.cached_prefix(keys[:length]) == length:
                return length
        return 0

    def _stored_prefix(
        self, tier: Tier, keys: Sequence[bytes], hits: int, room: int
    ) -> int:
        """Return the blocks of the longest prefix that pools and tier have.

        What the pools lack of it is fetched. hits: blocks of the pools' own prefix.
        room: blocks that the sequence allocates, or shares, in each group.
        """
        while (longest := self.cached_prefix(keys, tier)) > hits:
            if self.available_blocks < room - hits:
                return hits
            lacking = [
                (group, key)
                for group, pool in enumerate(self.pools)
                for key in keys[
                    self.before_window(group, longest * self.block_size) : longest
                ]
                if pool.find(key) is None
            ]
            if not tier.is_worth(lacking, (longest - hits) * self.block_size):
                return hits
            if tier.fetch(lacking):
                return longest
        return hits

    def _on_evict(self, group: int, block: int, key: bytes) -> None:
        """Record a block that is evicted, unless its contents were never loaded."""
        if self.on_event is not None and group == self.main_group:
            self.on_event(BlocksRemoved((key,)))
        if self._loaded.pop((group, block), None) is not None:
            return
        if self._tier is not None and not self._tier.holds(group, key):
            self._evicted.append(BlockMove(group, key, block))

    def take_moves(self) -> tuple[list[BlockMove], list[BlockMove]]:
        """Return the blocks to store in the tier, and those to load, in this order.

        Before the next step. Storing precedes loading: a block may be in both.
        """
        if not self._evicted and not self._loaded:
            return [], []
        loaded = [BlockMove(g, key, b) for (g, b), key in self._loaded.items()]
        moves = self._evicted, loaded
        self._evicted, self._loaded = [], {}
        return moves

    def before_window(self, group: int, position: int) -> int:
        """Leading blocks that no query at ``position`` or later sees in a group."""
        return passed_blocks(self.windows[group], position, self.block_size)

    def cached_prefix(self, keys: Sequence[bytes], tier: Tier | None = None) -> int:
        """Longest prefix, in blocks, of which every group has what its window needs.

        tier: counts as well.
        """
        groups = range(len(self.pools))
        runs = [0] * len(self.pools)  # consecutive cached blocks up to this one
        longest = 0
        for length, key in enumerate(keys, start=1):
            for group, pool in enumerate(self.pools):
                has = pool.find(key) is not None or (tier and tier.holds(group, key))
                runs[group] = runs[group] + 1 if has else 0
            position = length * self.block_size
            needed = (length - self.before_window(group, position) for group in groups)
            if all(run >= need for run, need in zip(runs, needed, strict=True)):
                longest = length
            elif None in self.windows and runs[self.windows.index(None)] < length:
                break
        return longest

    def grow(self, table: Table) -> bool:
        """Append one block in each group; ``False`` if a group has none left."""
        if not self.available_blocks:
            return False
        for pool, blocks in zip(self.pools, table, strict=True):
            blocks.append(pool.allocate())
        return True

    def publish(self, table: Table, index: int, key: bytes) -> bool:
        """Add block ``index`` of a table, whose tokens are collected, to the cache.

        Returns whether it is new in the group of the events.
        """
        added = [
            pool.publish(blocks[index], key)
            for pool, blocks in zip(self.pools, table, strict=True)
        ]
        return added[self.main_group]

    def forget(self) -> int:
        """Drop all keys; return the number of blocks that are free now."""
        count = sum(pool.forget() for pool in self.pools)
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.on_event is not None:
            self.on_event(BlocksCleared())
        return count

    def release(self, table: Table, step: int) -> None:
        """Free a table once ``step``, the newest that may touch it, is collected."""
        if step <= self._completed_step:
            self._free(table)
        else:
            self._pending_frees.setdefault(step, []).append(table)

    def complete_step(self, step: int) -> None:
        """Record that ``step`` and all before it are collected; free what waited."""
        self._completed_step = step
        for table in self._pending_frees.pop(step, ()):
            self._free(table)

    def _free(self, table: Table) -> None:
        for pool, blocks in zip(self.pools, table, strict=True):
            pool.free([block for block in blocks if block])
