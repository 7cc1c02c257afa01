"""Layout of the paged cache: keys and values of a block side by side, by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from inl.backend.base import StateSpec
from inl.backend.simple import zeroed_state
from inl.spec.cache import Paged, State
from inl.spec.limits import Limits
from inl_jax.tensors import Array

MAX_SINGLE_HEADS = 256
"""Most tokens whose heads are written one by one; more are prompts, for which writing
all heads of a token at once is faster, and which are not computed in loops."""


class Pages(NamedTuple):
    """One layer's cache.

    A block is one contiguous transfer, and a head's part of it a matrix with a key and
    its value in each row: with a head size of 64 it fills the 128 lanes of a TPU.
    """

    kv: Array
    """[blocks, kv_heads, block_size, 2 * head_dim]: keys, then values."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.kv.shape[2])


def paged_state(
    spec: StateSpec,
    limits: Limits,
    zeros: Callable[[tuple[int, ...], str], Any],
    cache: Callable[[tuple[int, ...], str], Any] | None = None,
) -> State:
    """Return zeroed state with :class:`Pages`, allocated by ``zeros``.

    cache: allocates the caches; ``zeros`` by default.
    """
    cache = cache or zeros
    paged = [item for item in spec if isinstance(item, Paged)]
    caches: dict[int, Pages] = {}
    for group, blocks in zip(paged, limits.blocks, strict=True):
        shape = (blocks, group.kv_heads, limits.block_size, 2 * group.head_dim)
        caches |= {layer: Pages(cache(shape, group.dtype)) for layer in group.layers}
    others = (
        item._replace(head_dim=0) if isinstance(item, Paged) else item for item in spec
    )
    state = zeroed_state(tuple(others), limits, zeros)
    return state._replace(caches=tuple(caches[layer] for layer in sorted(caches)))


def write_kv(k: Array, v: Array, cache: Pages, writes: Array) -> Pages:
    """The op ``write_kv`` on pages."""
    if writes.shape[0] == 1:
        # XLA makes an update of a slice of a scatter of one row, fuses it with the read
        # that follows, and then has to copy the cache. Two equal rows stay a scatter.
        k, v, writes = (jnp.concatenate([x, x]) for x in (k, v, writes))
    block, offset = writes // cache.block_size, writes % cache.block_size
    rows = jnp.concatenate([k, v], axis=-1)
    if writes.shape[0] > MAX_SINGLE_HEADS:
        return Pages(cache.kv.at[block, :, offset].set(rows))
    # A scatter of slices across an axis makes XLA choose another layout for the cache
    # of a loop, and copy it in each step.
    heads = jnp.arange(rows.shape[1])
    return Pages(cache.kv.at[block[:, None], heads, offset[:, None]].set(rows))
