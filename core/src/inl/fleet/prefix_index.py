"""Which replicas have the leading blocks of a prompt in their prefix caches.

A key is a hash of all tokens up to the end of a block, so blocks with equal keys follow
equal prefixes, and a prompt's deepest known block is found by bisection. A block is
predicted, since the router has sent such a prompt, or reported by the engine, which
says also whether a device, host memory or a file has it. Predicted blocks are forgotten
as engines do it, so that engines that report nothing are known, too.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice

BLOCK_TOKENS = 64
"""Tokens of a block of the index, whatever the engines' blocks have."""

MAX_BLOCKS = 1 << 20
"""Blocks of the index, each of one replica; see ``bench/fleet.py`` for their memory."""

MOST_HOLDERS = 64
"""Replicas that are remembered of one block; the others have it less recently."""


BLOCK_BYTES = 4 * BLOCK_TOKENS

LEVELS = ("device", "host", "disk")
"""Where an engine has a block, the fastest one first."""

NONE_BELOW = (0,) * (len(LEVELS) - 1)


def root_of(adapter_digest: str, cache_salt: str) -> bytes:
    """Return the digest before the first block of a prompt.

    cache_salt: separates prompts whose equal blocks are not shared.
    """
    # The length keeps the end of one text from being read as the next one.
    return sha256(
        f"{len(adapter_digest)} {adapter_digest}{cache_salt}".encode()
    ).digest()


def packed(tokens: Sequence[int]) -> bytes:
    """Return tokens as int32, of which ``BLOCK_BYTES`` are a block."""
    return array("i", tokens).tobytes()


def next_digest(parent: bytes, block: bytes) -> bytes:
    """Return the digest of a prefix that ends with a block. parent: that before it."""
    return sha256(parent + block).digest()


def key_of(digest: bytes) -> int:
    """Return the key of a digest: its first 64 bits, unsigned."""
    return int.from_bytes(digest[:8], "little")


def block_keys(tokens: Sequence[int], root: bytes = b"") -> list[int]:
    """Return the keys of the full blocks of a prompt. root: :func:`root_of`."""
    data, digest, keys = packed(tokens), root, []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest = sha256(digest + data[start : start + BLOCK_BYTES]).digest()
        keys.append(int.from_bytes(digest[:8], "little"))
    return keys


class PrefixIndex:
    """Replicas by the key of a block that they have. Not thread-safe.

    Of each replica, the predicted blocks that were used least recently are forgotten
    beyond its capacity, as its engine does; of one prompt the last ones first.
    max_blocks: of all replicas together, reported ones included.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, dict[int, int]] = {}
        """Replicas of each key, with their levels, the most recent one last."""
        self._blocks: dict[int, OrderedDict[int, None]] = {}
        """Predicted keys of each replica, the most recent one last."""
        self._reported: dict[int, dict[int, None]] = {}
        """Reported keys of each replica, the newest one last."""
        self._below: dict[int, int] = {}
        """Number of blocks of each replica that are not on its device, if any."""
        self._states: dict[int, set[int]] = {}
        """Of each replica of a model with recurrent state, the blocks behind which it
        has a snapshot of that."""
        self._expected: dict[int, set[int]] = {}
        """Of these replicas, predicted blocks of that kind."""
        self._capacities: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def open(self, replica: int, capacity: int) -> None:
        """Add a replica without blocks; capacity: blocks that it can have."""
        self._blocks[replica], self._reported[replica] = OrderedDict(), {}
        self._capacities[replica] = capacity

    def known_blocks(self, keys: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt some replica has."""
        return _deepest(len(keys), lambda at: keys[at] in self._holders)

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
        """Return how many leading blocks of a prompt a replica has, at any level.

        Up to the last snapshot, of a model with recurrent state.
        """
        holders = self._holders
        depth = _deepest(
            self.known_blocks(keys), lambda at: replica in holders.get(keys[at], ())
        )
        return self.restorable(replica, keys, depth)

    def restorable(self, replica: int, keys: Sequence[int], depth: int) -> int:
        """Return after how many of ``depth`` leading blocks a replica can go on."""
        if (states := self._states.get(replica)) is None:
            return depth
        expected = self._expected[replica]
        while depth and not (keys[depth - 1] in states or keys[depth - 1] in expected):
            depth -= 1
        return depth

    def report_states(
        self, replica: int, keys: Iterable[int], left: Iterable[int] = ()
    ) -> None:
        """Record behind which blocks a replica has snapshots, and ``left``: no more.

        Of a replica of which it is never called, all blocks can be shared.
        """
        states = self._states.setdefault(replica, set())
        self._expected.setdefault(replica, set())
        states.difference_update(left)
        states.update(keys)

    def below_device(
        self, replica: int, keys: Sequence[int], depth: int
    ) -> Sequence[int]:
        """Return how many of the leading ``depth`` blocks are at each level below.

        Blocks of faster levels come first, as caches evict the last ones first.
        """
        if replica not in self._below:
            return NONE_BELOW
        ends = [
            _deepest(depth, partial(self._is_within, replica, keys, level))
            for level in range(len(LEVELS) - 1)
        ]
        return [
            stop - start for start, stop in zip(ends, [*ends[1:], depth], strict=True)
        ]

    def _is_within(
        self, replica: int, keys: Sequence[int], level: int, at: int
    ) -> bool:
        """Whether a replica has a block at a level, or a faster one."""
        return self._holders.get(keys[at], {}).get(replica, len(LEVELS)) <= level

    def add(self, replica: int, keys: Sequence[int]) -> None:
        """Predict that a replica has, or will have, the blocks of a prompt."""
        blocks, capacity = self._blocks[replica], self._capacities[replica]
        expected = self._expected.get(replica)
        fits = 0 < len(keys) <= capacity
        if expected is not None and fits and keys[-1] not in self._reported[replica]:
            expected.add(keys[-1])
        # The last block first: it is forgotten first.
        for key in reversed(keys[:capacity]):
            holders = self._holders.setdefault(key, {})
            if (level := holders.pop(replica, None)) is None:
                level = 0
                blocks[key] = None
                self._count += 1
            elif key in blocks:
                blocks.move_to_end(key)
            self._hold(key, replica, level)
        while len(blocks) > capacity:
            self._forget(next(iter(blocks)), replica)
        self._bound(replica)

    def report(self, replica: int, keys: Iterable[int], level: int = 0) -> None:
        """Record that a replica has said that it has blocks. level: in ``LEVELS``."""
        blocks, reported = self._blocks[replica], self._reported[replica]
        expected = self._expected.get(replica)
        for key in keys:
            if expected:
                expected.discard(key)
            before = self._holders.setdefault(key, {}).pop(replica, None)
            if before is None:
                self._count += 1
            else:
                self._count_below(replica, -(before > 0))
                blocks.pop(key, None)
            reported[key] = None
            self._count_below(replica, level > 0)
            self._hold(key, replica, level)
        self._bound(replica)

    def withdraw(self, replica: int, keys: Iterable[int]) -> None:
        """Record that a replica has said that it has blocks no more.

        Those that are predicted stay: requests compute them.
        """
        reported = self._reported[replica]
        for key in keys:
            if key in reported:
                self._forget(key, replica)

    def clear(self, replica: int) -> None:
        """Forget all blocks of a replica."""
        self._states.pop(replica, None)
        self._expected.pop(replica, None)
        for key in [*self._blocks[replica], *self._reported[replica]]:
            self._forget(key, replica)

    def close(self, replica: int) -> None:
        """Forget a replica and its blocks."""
        self.clear(replica)
        del self._blocks[replica], self._reported[replica], self._capacities[replica]

    def _hold(self, key: int, replica: int, level: int) -> None:
        """Let a replica be the most recent holder of a block."""
        holders = self._holders[key]
        holders[replica] = level
        if len(holders) > MOST_HOLDERS:
            self._forget(key, next(iter(holders)))

    def _bound(self, replica: int) -> None:
        """Forget blocks of a replica while there are too many of all."""
        blocks, reported = self._blocks[replica], self._reported[replica]
        while self._count > self._max_blocks and (blocks or reported):
            self._forget(next(iter(blocks or reported)), replica)

    def _count_below(self, replica: int, change: int) -> None:
        if change:
            count = self._below.get(replica, 0) + change
            if count:
                self._below[replica] = count
            else:
                self._below.pop(replica, None)

    def _forget(self, key: int, replica: int) -> None:
        reported = self._reported[replica]
        del (reported if key in reported else self._blocks[replica])[key]
        if expected := self._expected.get(replica):
            expected.discard(key)
        self._count -= 1
        holders = self._holders[key]
        self._count_below(replica, -(holders.pop(replica) > 0))
        if not holders:
            del self._holders[key]


def _deepest(most: int, has: Callable[[int], bool]) -> int:
    """Return how many leading blocks are there, by bisection. has: by index."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if has(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
