"""State kept per sequence: paged key-value caches and per-slot arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from inl.dtypes import E4M3, SIZES
from inl.spec.step import Array, Tables


class Cache(NamedTuple):
    """Default layout of one layer's paged cache; a backend may use another."""

    k: Array
    """[blocks, block_size, kv_heads, head_dim]."""
    v: Array
    """[blocks, block_size, kv_heads, head_dim]."""
    scales: Array | None = None
    """Of a cache in float8_e4m3, float32 [2]: a key is its cached number times the
    first, a value times the second."""


class State(NamedTuple):
    """Everything that a step consumes and returns, in the backend's own layout."""

    caches: tuple[Any, ...]
    """One opaque cache per attention layer."""
    slotted: Mapping[str, Array]
    """Name -> [slots, ...]: per-sequence state other than keys and values."""
    tables: Tables


class KvScales(NamedTuple):
    """Factors of the keys and values of one layer's cache in float8_e4m3."""

    k: float = 1.0
    v: float = 1.0


class Paged(NamedTuple):
    """One cache group: layers whose keys and values share a block table."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    """int8 adds a float32 scale per token and head, in the backend's layout;
    float8_e4m3 has the constant ``scales``."""
    window: int | None = None
    """Tokens that a query attends to, its own included; ``None`` is all."""
    scales: tuple[KvScales, ...] = ()
    """Of a cache in float8_e4m3: those of each of ``layers``; empty if all are 1."""

    def layer_scales(self) -> dict[int, KvScales]:
        """Return the scales of each layer of a cache in float8_e4m3."""
        scales = self.scales or (KvScales(),) * len(self.layers)
        return dict(zip(self.layers, scales, strict=True))

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
    leading tokens; with "replay" only generated tokens do."""
    restores: tuple[Literal["drafts", "snapshot"], ...] = ()
    """What the state can go back to without being rebuilt. "drafts": the programs that
    verify drafts leave it as after the last accepted token. "snapshot": a copy of a
    slot's rows, made between steps, continues the sequence in any slot of the runner.
    Nothing by default: then drafts are refused, and no prefix is shared by copies."""


def kv_token_bytes(kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of one token's key and value in one layer."""
    scale = SIZES["float32"] if dtype == "int8" else 0
    size = 1 if dtype == E4M3 else SIZES[dtype]
    return 2 * kv_heads * (head_dim * size + scale)


def passed_blocks(window: int | None, position: int, block_size: int) -> int:
    """Leading blocks of a sequence that no query from ``position`` on attends to."""
    return 0 if window is None else max(position - window + 1, 0) // block_size
