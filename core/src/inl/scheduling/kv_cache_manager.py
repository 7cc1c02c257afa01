"""The block tables of sequences over all cache groups, under the settle rule.

Steps in flight may overlap on the device, so a block that one of them may still touch
belongs to its sequence: it is freed only when the newest such step is collected.
"""

from __future__ import annotations

from collections.abc import Sequence

from inl.scheduling.block_pool import BlockPool
from inl.spec.cache import passed_blocks

Table = list[list[int]]
"""Blocks of one sequence, in order, for each cache group."""


class KVCacheManager:
    """Gives and takes the same number of blocks in every group's pool.

    In a group with a window, what lies before the window may be given back early; a
    table then has block 0, nobody's, in its place.
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
        """Blocks that a sequence can still get, in the fullest group."""
        return min(pool.available_blocks for pool in self.pools)

    @property
    def has_pending_frees(self) -> bool:
        """Whether blocks wait for a step in flight before they are freed."""
        return bool(self._pending_frees)

    def admit(
        self, keys: Sequence[bytes], count: int, *, spare: int
    ) -> tuple[Table, int] | None:
        """Return a table of ``count`` blocks, and how many of its first are shared.

        Shared are those named by the leading ``keys`` that every group has, or has as
        far as its window shows. Gives ``None``, and takes nothing, unless ``spare``
        more blocks are available.
        """
        if self.available_blocks < count - len(keys) + spare:
            return None
        hits = self._hits(keys)
        table = []
        for group, pool in enumerate(self.pools):
            first = self.before_window(group, hits * self.block_size)
            table.append([0] * first + [pool.share(key) for key in keys[first:hits]])
        fresh = count - hits
        if self.available_blocks < fresh + spare:
            self._free(table)
            return None
        for pool, blocks in zip(self.pools, table, strict=True):
            blocks += pool.take_many(fresh)
        return table, hits

    def before_window(self, group: int, position: int) -> int:
        """Blocks of a sequence that no query from ``position`` on sees in a group."""
        return passed_blocks(self.windows[group], position, self.block_size)

    def _hits(self, keys: Sequence[bytes]) -> int:
        """Most leading blocks of which every group has what its window shows."""
        runs = [0] * len(self.pools)
        best = 0
        for hits, key in enumerate(keys, start=1):
            for group, pool in enumerate(self.pools):
                runs[group] = runs[group] + 1 if pool.find(key) is not None else 0
            position = hits * self.block_size
            shown = (hits - self.before_window(g, position) for g in range(len(runs)))
            if all(run >= wanted for run, wanted in zip(runs, shown, strict=True)):
                best = hits
            elif None in self.windows and runs[self.windows.index(None)] < hits:
                break
        return best

    def grow(self, table: Table) -> bool:
        """Append one block in each group; ``False`` where one of them has none."""
        if not self.available_blocks:
            return False
        for pool, blocks in zip(self.pools, table, strict=True):
            blocks.append(pool.take())
        return True

    def publish(self, table: Table, index: int, key: bytes) -> None:
        """Let others share block ``index`` of a table; its tokens are collected."""
        for pool, blocks in zip(self.pools, table, strict=True):
            pool.publish(blocks[index], key)

    def release(self, table: Table, step: int) -> None:
        """Free a table once ``step``, the newest that may touch it, is collected."""
        if step <= self._completed_step:
            self._free(table)
        else:
            self._pending_frees.setdefault(step, []).append(table)

    def complete_step(self, step: int) -> None:
        """Take note that ``step`` and all before it are collected."""
        self._completed_step = step
        for table in self._pending_frees.pop(step, ()):
            self._free(table)

    def _free(self, table: Table) -> None:
        for pool, blocks in zip(self.pools, table, strict=True):
            pool.free([block for block in blocks if block])
