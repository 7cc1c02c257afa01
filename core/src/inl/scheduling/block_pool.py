"""Who holds which block of one cache group, and which blocks are worth keeping."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Blocks ``1 .. blocks - 1`` with reference counts and a prefix cache.

    Block 0 is nobody's. A block is *held* (referenced), *idle* (unreferenced, but its
    content has a key and may be shared again) or *free*. Idle blocks are given away
    again, longest unused first, once no block is free. Every operation is O(1) a block.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._free = list(range(blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * blocks
        self._key_of: list[bytes | None] = [None] * blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def available_blocks(self) -> int:
        """Blocks that :meth:`take` can still give."""
        return len(self._free) + len(self._idle)

    @property
    def idle_blocks(self) -> int:
        """Blocks that nobody holds but whose content can be shared."""
        return len(self._idle)

    @property
    def held_blocks(self) -> int:
        """Blocks with at least one reference."""
        return self.blocks - 1 - self.available_blocks

    def references(self, block: int) -> int:
        """Return how many sequences hold ``block``."""
        return self._references[block]

    def find(self, key: bytes) -> int | None:
        """Return the block whose content ``key`` names, without taking it."""
        return self._block_of.get(key)

    def take(self) -> int:
        """Give a block with one reference and no key."""
        assert self.available_blocks, "callers ask for available_blocks first"
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """Give ``count`` blocks, as so many calls of :meth:`take` would."""
        assert count <= self.available_blocks, "callers ask for available_blocks first"
        kept = max(len(self._free) - count, 0)
        blocks = self._free[kept:][::-1]
        del self._free[kept:]
        blocks += [self._evict() for _ in range(count - len(blocks))]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._key_of[block]
        assert key is not None, "an idle block has a key"
        self._key_of[block] = None
        del self._block_of[key]
        return block

    def share(self, key: bytes) -> int:
        """Add a reference to the block that ``key`` names, which must be there."""
        block = self._block_of[key]
        if self._references[block] == 0:
            del self._idle[block]
        self._references[block] += 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Let others share ``block``, which is full and will not be written again.

        Does nothing where another block has the same content already.
        """
        assert self._references[block], "only a held block is published"
        if key not in self._block_of and self._key_of[block] is None:
            self._block_of[key] = block
            self._key_of[block] = key

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given in its order."""
        # Last-first, so that a shared prefix outlives the suffix that hangs on it.
        for block in reversed(blocks):
            assert self._references[block], "a block is freed once by each holder"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._key_of[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None
