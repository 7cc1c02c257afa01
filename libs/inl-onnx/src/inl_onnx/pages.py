"""Layout of the paged cache: blocks by key head."""

from __future__ import annotations

from typing import Any, NamedTuple


class Pages(NamedTuple):
    """One layer's cache.

    With the heads first, gathering the blocks of a sequence gives the operands of its
    products without a transposition.
    """

    k: Any
    """[kv_heads, blocks, block_size, head_dim]."""
    v: Any
    """[kv_heads, blocks, block_size, head_dim]."""
