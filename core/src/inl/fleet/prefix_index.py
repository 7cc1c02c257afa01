"""Which replicas have the leading blocks of a prompt in their prefix caches.

A key is a hash of all tokens up to the end of a block, so blocks with equal keys follow
equal prefixes, and a prompt's deepest known block is found by bisection. The index
learns from the prompts that the router sends, and forgets as engines do, so it needs
nothing of them but the size of their caches.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

BLOCK_TOKENS = 64
"""Tokens of a block of the index, whatever the engines' blocks have."""

MAX_BLOCKS = 1 << 20
"""Blocks of the index, each of one replica; see ``bench/fleet.py`` for their memory."""

MOST_HOLDERS = 64
"""Replicas that are remembered of one block; the others have it less recently."""


def block_keys(tokens: Sequence[int], salt: str = "") -> list[int]:
    """Return the keys of the full blocks of a prompt.

    salt: separates prompts whose equal blocks are not shared.
    """
    size = 4 * BLOCK_TOKENS
    data = array("i", tokens).tobytes()
    # Python's own hash: keyed by random bits of this process, so that no client can
    # choose prompts with equal keys, and ten times as fast as a digest.
    parent, keys = hash(salt), []
    for start in range(0, len(data) - size + 1, size):
        parent = hash((parent, data[start : start + size]))
        keys.append(parent)
    return keys


class PrefixIndex:
    """Replicas by the key of a block that they have. Not thread-safe.

    Of each replica, the blocks that were used least recently are forgotten beyond its
    capacity, as its engine does; of one prompt the last ones first.
    max_blocks: of all replicas together.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, dict[int, None]] = {}
        """Replicas of each key, the most recent one last."""
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        """Keys of each replica, the most recent one last."""
        self._capacities: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def open(self, replica: int, capacity: int) -> None:
        """Add a replica without blocks; capacity: blocks that it can have."""
        self._blocks[replica] = OrderedDict()
        self._capacities[replica] = capacity

    def known_blocks(self, keys: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt some replica has."""
        holders = self._holders
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in holders:
                low = middle
            else:
                high = middle - 1
        return low

    def holders(self, key: int) -> Iterator[int]:
        """Yield the replicas that have a block, the most recent one first."""
        return reversed(self._holders.get(key, {}))

    def candidates(self, keys: Sequence[int], most: int) -> dict[int, int]:
        """Return up to ``most`` replicas, with the leading blocks that each has.

        They are the holders of the deepest known block, and of the one at half its
        depth, which more replicas have.
        """
        depth = self.known_blocks(keys)
        found: dict[int, int] = {}
        for at in (depth, depth // 2):
            if at and len(found) < most:
                for replica in islice(self.holders(keys[at - 1]), most - len(found)):
                    if replica not in found:
                        found[replica] = at
        return found

    def blocks_of(self, replica: int, keys: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt a replica has."""
        holders = self._holders
        low, high = 0, self.known_blocks(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if replica in holders.get(keys[middle - 1], ()):
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, replica: int, keys: Sequence[int]) -> None:
        """Record that a replica has, or will have, the blocks of a prompt."""
        blocks, capacity = self._blocks[replica], self._capacities[replica]
        # The last block first: it is forgotten first.
        for key in reversed(keys[:capacity]):
            holders = self._holders.setdefault(key, {})
            if key in blocks:
                blocks.move_to_end(key)
                del holders[replica]
            else:
                blocks[key] = None
                self._count += 1
            holders[replica] = None
            if len(holders) > MOST_HOLDERS:
                self._forget(key, next(iter(holders)))
        while len(blocks) > capacity or self._count > self._max_blocks:
            self._forget(next(iter(blocks)), replica)

    def close(self, replica: int) -> None:
        """Forget a replica and its blocks."""
        for key in list(self._blocks[replica]):
            self._forget(key, replica)
        del self._blocks[replica], self._capacities[replica]

    def _forget(self, key: int, replica: int) -> None:
        del self._blocks[replica][key]
        self._count -= 1
        holders = self._holders[key]
        del holders[replica]
        if not holders:
            del self._holders[key]
