"""The block tables of sequences over all cache groups, under the settle rule.

Steps in flight may overlap on the device, so a block that one of them may still touch
belongs to its sequence: it is freed only when the newest such step is collected.
"""

from __future__ import annotations

from collections.abc import Sequence

from inl.runtime.blocks import BlockPool

Table = list[list[int]]
"""Blocks of one sequence, in order, for each cache group."""


class Memory:
    """Gives and takes the same number of blocks in every group's pool."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self.pools = tuple(pools)
        self.block_size = self.pools[0].block_size
        self._settled = 0
        self._settling: dict[int, list[Table]] = {}

    @property
    def available_blocks(self) -> int:
        """Blocks that a sequence can still get, in the fullest group."""
        return min(pool.available_blocks for pool in self.pools)

    @property
    def settling(self) -> bool:
        """Whether blocks wait for a step in flight before they are freed."""
        return bool(self._settling)

    def admit(
        self, keys: Sequence[bytes], count: int, *, spare: int
    ) -> tuple[Table, int] | None:
        """Return a table of ``count`` blocks, and how many of its first are shared.

        Shared are those named by the leading ``keys`` that every group has. Gives
        ``None``, and takes nothing, unless ``spare`` more blocks are available.
        """
        if self.available_blocks < count - len(keys) + spare:
            return None
        hits = self._hits(keys)
        table = [[pool.share(key) for key in keys[:hits]] for pool in self.pools]
        fresh = count - hits
        if self.available_blocks < fresh + spare:
            self._free(table)
            return None
        for pool, blocks in zip(self.pools, table, strict=True):
            blocks.extend(pool.take() for _ in range(fresh))
        return table, hits

    def _hits(self, keys: Sequence[bytes]) -> int:
        for hits, key in enumerate(keys):
            if any(pool.find(key) is None for pool in self.pools):
                return hits
        return len(keys)

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
        if step <= self._settled:
            self._free(table)
        else:
            self._settling.setdefault(step, []).append(table)

    def settle(self, step: int) -> None:
        """Take note that ``step`` and all before it are collected."""
        self._settled = step
        for table in self._settling.pop(step, ()):
            self._free(table)

    def _free(self, table: Table) -> None:
        for pool, blocks in zip(self.pools, table, strict=True):
            pool.free(blocks)
