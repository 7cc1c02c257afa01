"""Block tables of sequences over all cache groups, with delayed frees.

Steps in flight may still read or write a sequence's blocks on the device. Its blocks
are therefore freed only when the newest step that may touch them is collected.
"""

from __future__ import annotations

from collections.abc import Sequence

from inl.kv.block_pool import BlockPool
from inl.spec.cache import passed_blocks

Table = list[list[int]]
"""[G][blocks]: the blocks of one sequence, in order, for each cache group."""


class KVCacheManager:
    """Allocates, shares and frees the blocks of sequences in every group's pool.

    windows: tokens that a query sees in each group, ``None`` for all. Blocks before a
    group's window may be freed early; the table then has block 0 in their place.
    """

    def __init__(
        self, pools: Sequence[BlockPool], windows: Sequence[int | None] = ()
    ) -> None:
        self.pools = tuple(pools)
        self.windows = tuple(windows) or (None,) * len(self.pools)
        self.block_size = self.pools[0].block_size
        self._completed_step = 0
        self._pending_frees: dict[int, list[Table]] = {}

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
        hits = self.cached_prefix(keys)
        if recomputes_block and hits:
            hits = self.cached_prefix(keys[: hits - 1])
        table = []
        for group, pool in enumerate(self.pools):
            first = self.before_window(group, hits * self.block_size)
            table.append([0] * first + [pool.share(key) for key in keys[first:hits]])
        fresh = count - hits
        if self.available_blocks < fresh + spare:
            self._free(table)
            return None
        for pool, blocks in zip(self.pools, table, strict=True):
            blocks += pool.allocate_many(fresh)
        return table, hits

    def before_window(self, group: int, position: int) -> int:
        """Leading blocks that no query at ``position`` or later sees in a group."""
        return passed_blocks(self.windows[group], position, self.block_size)

    def cached_prefix(self, keys: Sequence[bytes]) -> int:
        """Longest prefix, in blocks, of which every group has what its window needs."""
        groups = range(len(self.pools))
        runs = [0] * len(self.pools)  # consecutive cached blocks up to this one
        longest = 0
        for length, key in enumerate(keys, start=1):
            for group, pool in enumerate(self.pools):
                runs[group] = runs[group] + 1 if pool.find(key) is not None else 0
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

    def publish(self, table: Table, index: int, key: bytes) -> None:
        """Add block ``index`` of a table, whose tokens are collected, to the cache."""
        for pool, blocks in zip(self.pools, table, strict=True):
            pool.publish(blocks[index], key)

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
