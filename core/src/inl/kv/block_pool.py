"""Reference-counted KV cache blocks of one cache group, with prefix caching."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """Allocates blocks ``1 .. blocks - 1`` and finds cached ones by key.

    Block 0 is reserved for padding. A block is *used* (referenced), *cached*
    (unreferenced, with a key, so that its content can be shared again) or *free*.
    Cached blocks are evicted, least recently used first, once no block is free. Every
    operation is O(1) per block.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * blocks
        self._key_of: list[bytes | None] = [None] * blocks
        self._block_of: dict[bytes, int] = {}
        self.on_evict: Callable[[int, bytes], object] | None = None
        """Called with each cached block that is evicted, and its key."""

    @property
    def available_blocks(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached_blocks(self) -> int:
        """Unreferenced blocks whose content can be shared."""
        return len(self._cached)

    @property
    def used_blocks(self) -> int:
        """Blocks with at least one reference."""
        return self.blocks - 1 - self.available_blocks

    def ref_count(self, block: int) -> int:
        """Return the number of sequences that reference ``block``."""
        return self._ref_counts[block]

    def find(self, key: bytes) -> int | None:
        """Return the block with this key, without adding a reference."""
        return self._block_of.get(key)

    def allocate(self) -> int:
        """Return a block with one reference and no key."""
        assert self.available_blocks, "the caller checks available_blocks"
        block = self._free.pop() if self._free else self._evict()
        self._ref_counts[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """Return the blocks that ``count`` calls of :meth:`allocate` would."""
        assert count <= self.available_blocks, "the caller checks available_blocks"
        remaining = max(len(self._free) - count, 0)
        blocks = self._free[remaining:][::-1]
        del self._free[remaining:]
        blocks += [self._evict() for _ in range(count - len(blocks))]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._key_of[block]
        assert key is not None, "a cached block has a key"
        self._key_of[block] = None
        del self._block_of[key]
        if self.on_evict is not None:
            self.on_evict(block, key)
        return block

    def published(self) -> list[tuple[bytes, int]]:
        """Return the key of each block that has one, in order of publication."""
        return list(self._block_of.items())

    def share(self, key: bytes) -> int:
        """Add a reference to the block with this key, which must exist."""
        block = self._block_of[key]
        if self._ref_counts[block] == 0:
            del self._cached[block]
        self._ref_counts[block] += 1
        return block

    def publish(self, block: int, key: bytes) -> bool:
        """Register a full block, which is not written again, under its key.

        Returns ``False``, and does nothing, if another block with this key, or another
        key of this block, is registered.
        """
        assert self._ref_counts[block], "only a used block is published"
        if key in self._block_of or self._key_of[block] is not None:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def forget(self) -> int:
        """Drop all keys; return the number of cached blocks, which are free now."""
        count = self.cached_blocks
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        for block in self._block_of.values():
            self._key_of[block] = None
        self._block_of.clear()
        return count

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given in table order."""
        # In reverse, so that a suffix is evicted before the prefix that it needs.
        for block in reversed(blocks):
            assert self._ref_counts[block], "a block is freed once per reference"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if self._key_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
