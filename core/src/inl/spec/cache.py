"""State that a sequence leaves behind: paged key-value caches and per-slot arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from inl.dtypes import SIZES
from inl.spec.step import Array, Tables


class Cache(NamedTuple):
    """The default layout of one layer's paged cache; a backend may have its own."""

    k: Array
    """[blocks, block_size, kv_heads, head_dim]."""
    v: Array
    """[blocks, block_size, kv_heads, head_dim]."""


class State(NamedTuple):
    """All that a step consumes and returns; its layout is the backend's affair."""

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
    """int8 has a float32 scale for each token and head, laid out by the backend."""
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        scale = SIZES["float32"] if self.dtype == "int8" else 0
        return 2 * self.kv_heads * (self.head_dim * SIZES[self.dtype] + scale)


class Slotted(NamedTuple):
    """State of fixed size per sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rebuild: Literal["tokens", "replay", "save"]
    """"tokens": recomputing restores it; "replay": one by one; "save": only a copy."""


def passed_blocks(window: int | None, position: int, block_size: int) -> int:
    """Leading blocks of a sequence that no query from ``position`` on sees."""
    return 0 if window is None else max(position - window + 1, 0) // block_size
