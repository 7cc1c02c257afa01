"""State kept per sequence: paged key-value caches and per-slot arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from inl.dtypes import SIZES
from inl.spec.step import Array, Tables


class Cache(NamedTuple):
    """Default layout of one layer's paged cache; a backend may use another."""

    k: Array
    """[blocks, block_size, kv_heads, head_dim]."""
    v: Array
    """[blocks, block_size, kv_heads, head_dim]."""


class State(NamedTuple):
    """Everything that a step consumes and returns, in the backend's own layout."""

    caches: tuple[Any, ...]
    """One opaque cache per attention layer."""
    slotted: Mapping[str, Array]
    """Name -> [slots, ...]: per-sequence state other than keys and values."""
    tables: Tables


class Paged(NamedTuple):
    """One cache group: layers whose keys and values share a block table."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    """int8 adds a float32 scale per token and head, in the backend's layout."""
    window: int | None = None
    """Tokens that a query attends to, its own included; ``None`` is all."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return kv_token_bytes(self.kv_heads, self.head_dim, self.dtype)


class Slotted(NamedTuple):
    """State of fixed size per sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rebuild: Literal["tokens", "replay"]
    """How a preempted sequence restores it: "tokens" recomputes the prompt and the
    answer in chunks of any size, "replay" recomputes the answer one token per step.
    With "tokens" every token changes the state, so that requests share no blocks of
    leading tokens; with "replay" only generated tokens do. Neither state can go back
    to before a rejected draft."""


def kv_token_bytes(kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of one token's key and value in one layer."""
    scale = SIZES["float32"] if dtype == "int8" else 0
    return 2 * kv_heads * (head_dim * SIZES[dtype] + scale)


def passed_blocks(window: int | None, position: int, block_size: int) -> int:
    """Leading blocks of a sequence that no query from ``position`` on attends to."""
    return 0 if window is None else max(position - window + 1, 0) // block_size
