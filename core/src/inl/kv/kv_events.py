"""What happens to the shared blocks of a cache, for routers outside of the engine."""

from __future__ import annotations

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
