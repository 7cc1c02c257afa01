"""Layout of the paged cache: blocks by key head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from inl.backend.base import StateSpec
from inl.backend.simple import zeroed_state
from inl.spec.cache import Paged, State
from inl.spec.limits import Limits


class Pages(NamedTuple):
    """One layer's cache.

    With the heads first, gathering the blocks of a sequence gives the operands of its
    products without a transposition.
    """

    k: Any
    """[kv_heads, blocks, block_size, head_dim]."""
    v: Any
    """[kv_heads, blocks, block_size, head_dim]."""


def paged_state(
    spec: StateSpec,
    limits: Limits,
    zeros: Callable[[tuple[int, ...], str], Any],
    page_zeros: Callable[[tuple[int, ...], str], Any],
) -> State:
    """Return zeroed state with :class:`Pages`, which ``page_zeros`` allocates."""
    paged = [item for item in spec if isinstance(item, Paged)]
    caches: dict[int, Pages] = {}
    for group, blocks in zip(paged, limits.blocks, strict=True):
        shape = (group.kv_heads, blocks, limits.block_size, group.head_dim)
        for layer in group.layers:
            caches[layer] = Pages(*(page_zeros(shape, group.dtype) for _ in "kv"))
    others = (
        item._replace(head_dim=0) if isinstance(item, Paged) else item for item in spec
    )
    state = zeroed_state(tuple(others), limits, zeros)
    return state._replace(caches=tuple(caches[layer] for layer in sorted(caches)))
