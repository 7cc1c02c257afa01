"""Publishes to front-ends which prompt blocks an engine has cached, on which tier.

The engine reports blocks of its own size as they are shared, evicted, and moved between
tiers, and the places of snapshots of recurrent state. Here both become keys of the
front-ends' index (:mod:`inl.fleet.prefix_index`). A front-end that asks gets all of
them, and then what changes, in numbered messages.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from inl.engine.records import BlocksCleared, BlocksRemoved, BlocksStored
from inl.fleet.prefix_index import (
    BLOCK_BYTES,
    LEVELS,
    key_of,
    next_digest,
    packed,
    root_of,
)
from inl.serve.frontends.messages import Prefixes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.records import KVEvent

FLUSH_SECONDS = 0.02
"""Time in which changes are collected for one message."""

MOST_LEFT = 4096
"""Evicted blocks that are remembered: a tier stores them a step later."""

DEVICE = 0


@dataclass(slots=True, eq=False)
class _Block:
    """A block of the engine."""

    digest: bytes
    """Of the last block of the index that has ended in it, or before."""
    rest: bytes
    """Its tokens, and those before, behind that."""
    keys: list[int]
    """Of the blocks of the index that end in it."""
    on_device: bool = True
    tier: int | None = None
    """Level of the tier that has it, too."""

    @property
    def level(self) -> int | None:
        """The fastest level that has it."""
        return DEVICE if self.on_device else self.tier


class _State(NamedTuple):
    """Whether there is a snapshot after a block now; without a key: there is none."""

    key: bytes | None
    is_held: bool


class _States:
    """Blocks of the index behind which there is a snapshot, or that have its border."""

    def __init__(self) -> None:
        self._keys: dict[bytes, int] = {}
        """Of the index, by those of the engine's blocks."""
        self._counts: Counter[int] = Counter()
        self._changed: dict[int, None] = {}

    def add(self, key: bytes, block: _Block) -> None:
        if key not in self._keys:
            self._keys[key] = found = key_of(block.digest)
            self._counts[found] += 1
            self._changed[found] = None

    def discard(self, key: bytes | None) -> None:
        for each in list(self._keys) if key is None else [key]:
            if (found := self._keys.pop(each, None)) is not None:
                self._counts[found] -= 1
                self._changed[found] = None

    def all(self) -> bytes:
        """Return all keys of the index."""
        return array("Q", [key for key, n in self._counts.items() if n]).tobytes()

    def take_changes(self) -> tuple[bytes, bytes]:
        """Return new keys of the index since the last call, and those that are none."""
        new, left = array("Q"), array("Q")
        for key in self._changed:
            if self._counts[key]:
                new.append(key)
            else:
                left.append(key)
                del self._counts[key]
        self._changed.clear()
        return new.tobytes(), left.tobytes()


class BlockFeed:
    """Follows one engine, before its first request.

    Events arrive on any thread; all other methods are used by the event loop. also:
    gets the engine's events, too.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        also: Callable[[KVEvent], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine, self._also = engine, also
        self._events: deque[KVEvent | _State | tuple[bytes, str | None]] = deque()
        self._is_due = False
        """Whether the event loop knows that there are events."""
        self._blocks: dict[bytes, _Block] = {}
        self._left: OrderedDict[bytes, _Block] = OrderedDict()
        self._generation = 0
        self._changes: dict[int, int | None] = {}
        """New level of each key; ``None``: the engine has it no more."""
        self._number = 0
        self._sends: dict[object, Callable[[Prefixes], None]] = {}
        """By front-end."""
        self._states: _States | None = None
        """Of a model with recurrent state."""
        if engine.snapshots is not None:
            self._states = _States()
            engine.snapshots.on_change = self._tell_state
        if engine.tiers is not None:
            self._generation = engine.tiers.generation
            engine.tiers.on_place = self._tell_place
        engine.report_kv_events(self._tell)

    def _tell(self, event: KVEvent) -> None:
        if self._also is not None:
            self._also(event)
        self._put(event)

    def _tell_place(self, group: int, key: bytes, tier: str | None) -> None:
        if group == self._engine.core.scheduler.kv_cache.main_group:
            self._put((key, tier))

    def _tell_state(self, key: bytes | None, is_held: bool) -> None:
        self._put(_State(key, is_held))

    def _put(self, event: KVEvent | _State | tuple[bytes, str | None]) -> None:
        self._events.append(event)
        if not self._is_due:
            self._is_due = True
            try:
                self._loop.call_soon_threadsafe(self._wait)
            except RuntimeError:  # the loop is closed
                return

    def _wait(self) -> None:
        self._loop.call_later(FLUSH_SECONDS, self.flush)

    def follow(self, front_end: object, send: Callable[[Prefixes], None]) -> None:
        """Send a front-end all blocks, and from now on what changes."""
        self.flush()
        self._sends[front_end] = send
        found: list[array[int]] = [array("Q") for _ in LEVELS]
        for block in self._blocks.values():
            if block.keys and (level := block.level) is not None:
                found[level].extend(block.keys)
        levels = [each.tobytes() for each in found]
        states = None if self._states is None else self._states.all()
        send(Prefixes(self._number, True, levels, b"", self._costs(), states))

    def leave(self, front_end: object) -> None:
        """Send a front-end nothing more."""
        self._sends.pop(front_end, None)

    def resume(self, front_end: object) -> None:
        """Send a front-end that was behind an empty message, which shows a gap."""
        if (send := self._sends.get(front_end)) is not None:
            none = [b""] * len(LEVELS)
            states = None if self._states is None else b""
            send(Prefixes(self._number, False, none, b"", self._costs(), states))

    def flush(self) -> None:
        """Apply all events, and send what they have changed."""
        self._is_due = False
        while self._events:
            self._apply(self._events.popleft())
        states, left = (
            (None, b"") if self._states is None else self._states.take_changes()
        )
        if not (self._changes or states or left):
            return
        removed = array("Q")
        found: list[array[int]] = [array("Q") for _ in LEVELS]
        for key, level in self._changes.items():
            (removed if level is None else found[level]).append(key)
        self._changes.clear()
        self._number += 1
        levels = [each.tobytes() for each in found]
        message = Prefixes(
            self._number, False, levels, removed.tobytes(), self._costs(), states, left
        )
        for send in self._sends.values():
            send(message)

    def _apply(self, event: KVEvent | _State | tuple[bytes, str | None]) -> None:
        if isinstance(event, _State):
            self._apply_state(*event)
        elif isinstance(event, BlocksStored):
            self._stored(event)
        elif isinstance(event, BlocksRemoved):
            for key in event.keys:
                if (block := self._blocks.get(key)) is not None:
                    block.on_device = False
                    self._changed(key, block)
        elif isinstance(event, BlocksCleared):
            self._cleared()
        else:
            key, tier = event
            found = self._blocks.get(key) or self._left.pop(key, None)
            if found is not None:
                found.tier = None if tier is None else LEVELS.index(tier)
                self._blocks[key] = found
                self._changed(key, found)

    def _apply_state(self, key: bytes | None, is_held: bool) -> None:
        assert self._states is not None, "it has snapshots"
        if not is_held or key is None:
            self._states.discard(key)
        elif (block := self._find(key)) is not None:
            self._states.add(key, block)

    def _stored(self, event: BlocksStored) -> None:
        if event.parent is None:
            digest, rest = root_of(event.adapter_digest, ""), b""
        elif (parent := self._find(event.parent)) is not None:
            digest, rest = parent.digest, parent.rest
        else:
            return  # the digests of what precedes it are unknown
        data, size = packed(event.tokens), 4 * event.block_size
        for at, key in enumerate(event.keys):
            rest += data[at * size : (at + 1) * size]
            keys = []
            while len(rest) >= BLOCK_BYTES:
                digest = next_digest(digest, rest[:BLOCK_BYTES])
                rest = rest[BLOCK_BYTES:]
                keys.append(key_of(digest))
            block = self._find(key)
            if block is None:
                block = _Block(digest, rest, keys)
            block.on_device = True
            self._left.pop(key, None)
            self._blocks[key] = block
            self._changed(key, block)

    def _find(self, key: bytes) -> _Block | None:
        return self._blocks.get(key) or self._left.get(key)

    def _changed(self, key: bytes, block: _Block) -> None:
        """Note the level of a block, and forget one that nothing has."""
        level = block.level
        self._changes.update(dict.fromkeys(block.keys, level))
        if level is None:
            del self._blocks[key]
            self._left[key] = block
            if len(self._left) > MOST_LEFT:
                self._left.popitem(last=False)

    def _cleared(self) -> None:
        """Forget what the device has, and what tiers have if they are empty, too."""
        tiers = self._engine.tiers
        is_empty = tiers is None or tiers.generation != self._generation
        self._generation = 0 if tiers is None else tiers.generation
        for key, block in list(self._blocks.items()):
            block.on_device = False
            if is_empty:
                block.tier = None
            self._changed(key, block)

    def _costs(self) -> Sequence[float]:
        """Return the time to read a token of each tier, by that to compute it.

        0: it is not known yet.
        """
        tiers = self._engine.tiers
        if tiers is None:
            return ()
        kv_cache = self._engine.core.scheduler.kv_cache
        tokens = kv_cache.block_size / len(kv_cache.pools)
        return [tiers.costs.relative(name, tokens) or 0.0 for name in LEVELS[1:]]


def unpacked(keys: bytes) -> Iterable[int]:
    """Return the keys of a message."""
    found = array("Q")
    found.frombytes(keys)
    return found
