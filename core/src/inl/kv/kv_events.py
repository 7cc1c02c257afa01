"""What happens to the shared blocks of a cache, for routers outside of the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple


class BlocksStored(NamedTuple):
    """Consecutive blocks of a sequence can be shared from now on."""

    keys: Sequence[bytes]
    parent: bytes | None
    """Key of the block before the first one, if there is one."""
    tokens: Sequence[int]
    """Those of all blocks."""
    block_size: int
    """Tokens of a block."""
    adapter_digest: str
    """Of the adapter; "" is none."""


class BlocksRemoved(NamedTuple):
    """Blocks were evicted."""

    keys: Sequence[bytes]


class BlocksCleared(NamedTuple):
    """No block can be shared any more."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared

OnKVEvent = Callable[[KVEvent], None]
"""Called on the thread that steps the engine; returns at once."""


class MergedEvents:
    """Reports the blocks of several ranks as those of one cache.

    A block is stored while a rank has it: it is removed with the last copy.
    """

    def __init__(self, on_event: OnKVEvent) -> None:
        self._on_event = on_event
        self._copies = Counter[bytes]()

    def __call__(self, event: KVEvent) -> None:
        if isinstance(event, BlocksStored):
            self._copies.update(event.keys)
            self._on_event(event)
        elif isinstance(event, BlocksRemoved):
            self._copies.subtract(event.keys)
            gone = [key for key in event.keys if self._copies[key] < 1]
            for key in gone:
                del self._copies[key]
            if gone:
                self._on_event(BlocksRemoved(gone))
        else:
            # All ranks forget their blocks together.
            self._copies.clear()
            self._on_event(event)
