"""Layout of the paged cache: keys and values of a block side by side, by head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from inl.backend.base import CacheBytes, StateSpec
from inl.backend.block_io import BlockIO, Blocks
from inl.backend.simple import zeroed_state
from inl.dtypes import SIZES
from inl.spec.cache import Paged, State
from inl.spec.limits import Limits
from inl_jax.tensors import BITS, Array

INT8 = "int8"
"""Dtype of quantized caches."""

INT8_MAX = 127

LANES = 128
"""Width of a vector register of a TPU."""

MAX_SINGLE_HEADS = 256
"""Most tokens whose heads are written one by one; more are prompts, for which writing
all heads of a token at once is faster, and which are not computed in loops."""


class Pages(NamedTuple):
    """One layer's cache.

    A block is one contiguous transfer, and a head's part of it a matrix with a key and
    its value in each row: with a head size of 64 it fills the 128 lanes of a TPU.
    """

    kv: Array
    """[blocks, kv_heads, block_size, 2 * head_dim]: keys, then values; bfloat16
    may be stored as :data:`~inl_jax.tensors.BITS`."""
    scales: Array | None = None
    """[blocks, kv_heads, lanes] float32, of an int8 cache: those of a block's keys,
    then of its values, then padding. Tokens run along lanes, as scores do."""

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
    cells, size = cache or zeros, limits.block_size

    def pages(group: Paged, _layer: int, blocks: int) -> Pages:
        shape = (blocks, group.kv_heads, size, 2 * group.head_dim)
        scales = None
        if group.dtype == INT8:
            scales = cells((*shape[:2], scale_lanes(size)), "float32")
        return Pages(cells(shape, group.dtype), scales)

    return zeroed_state(spec, limits, zeros, cache=pages)


def block_bytes(group: Paged, block_size: int) -> int:
    """Return the bytes of a block of one layer."""
    cells = block_size * 2 * group.head_dim * SIZES[group.dtype]
    scales = 4 * scale_lanes(block_size) if group.dtype == INT8 else 0
    return group.kv_heads * (cells + scales)


LAYOUT = CacheBytes(block_bytes)


def scale_lanes(block_size: int) -> int:
    """Return the lanes of a block's scales: whole registers."""
    return 2 * block_size + -2 * block_size % LANES


def write_kv(k: Array, v: Array, cache: Pages, writes: Array) -> Pages:
    """The op ``write_kv`` on pages."""
    if writes.shape[0] == 1:
        # XLA makes an update of a slice of a scatter of one row, fuses it with the read
        # that follows, and then has to copy the cache. Two equal rows stay a scatter.
        k, v, writes = (jnp.concatenate([x, x]) for x in (k, v, writes))
    size = cache.block_size
    block, offset = writes // size, writes % size
    rows, scales = cells_of(k, v, cache)
    kv = scattered(cache.kv, block, offset, rows)
    if cache.scales is None or scales is None:
        return Pages(kv)
    stored = scattered(cache.scales, block, offset, scales[..., 0])
    return Pages(kv, scattered(stored, block, size + offset, scales[..., 1]))


def cells_of(k: Array, v: Array, cache: Pages) -> tuple[Array, Array | None]:
    """Return the cells [T, kv_heads, 2 * head_dim] of keys and values.

    Those of an int8 cache are codes, with scales [T, kv_heads, 2] float32.
    """
    if cache.scales is None:
        cells = jnp.concatenate([k, v], axis=-1)
        if cache.kv.dtype == BITS:
            cells = cells.astype(jnp.bfloat16)
            return jax.lax.bitcast_convert_type(cells, BITS), None
        return cells.astype(cache.kv.dtype), None
    pair = jnp.stack([k, v], axis=-2).astype(jnp.float32)
    scales = jnp.abs(pair).max(-1) / INT8_MAX
    codes = jnp.round(pair / jnp.where(scales > 0, scales, 1)[..., None])
    return codes.astype(jnp.int8).reshape(*k.shape[:2], -1), scales


def scattered(pages: Array, block: Array, offset: Array, rows: Array) -> Array:
    """Write ``rows`` [T, kv_heads, ...] to ``pages[block, :, offset]``."""
    if rows.shape[0] > MAX_SINGLE_HEADS:
        return pages.at[block, :, offset].set(rows)
    # A scatter of slices across an axis makes XLA choose another layout for the cache
    # of a loop, and copy it in each step.
    heads = jnp.arange(rows.shape[1])
    return pages.at[block[:, None], heads, offset[:, None]].set(rows)


def read_kv(cache: Pages, ids: Array) -> tuple[Array, Array]:
    """Return the keys and values of blocks ``ids`` [N, B].

    Both are [N, kv_heads, B * block_size, head_dim]; those of an int8 cache float32.
    """
    heads, size = cache.kv.shape[1:3]
    found = cache.kv[ids]
    if found.dtype == BITS:
        found = jax.lax.bitcast_convert_type(found, jnp.bfloat16)
    cells = found.swapaxes(1, 2).reshape(len(ids), heads, -1, 2, head_dim(cache))
    if cache.scales is not None:
        # [N, B, heads, 2, size] -> [N, heads, B, size, 2]
        scales = cache.scales[ids][..., : 2 * size]
        scales = scales.reshape(*ids.shape, heads, 2, size)
        scales = scales.transpose(0, 2, 1, 4, 3).reshape(*cells.shape[:-1], 1)
        cells = cells.astype(jnp.float32) * scales
    return cells[..., 0, :], cells[..., 1, :]


def read_blocks(state: State, group: Paged, blocks: Array) -> Blocks:
    """Return the contents of blocks."""
    count, dim = blocks.shape[0], group.head_dim
    cells, scales = [], []
    for cache in (state.caches[layer] for layer in group.layers):
        size = cache.block_size
        found = cache.kv[blocks].reshape(count, group.kv_heads, size, 2, dim)
        cells.append(found.transpose(3, 0, 2, 1, 4))
        if cache.scales is not None:
            lanes = cache.scales[blocks][..., : 2 * size]
            lanes = lanes.reshape(count, group.kv_heads, 2, size)
            scales.append(lanes.transpose(2, 0, 3, 1))
    return Blocks(jnp.stack(cells), jnp.stack(scales) if scales else None)


def write_blocks(state: State, group: Paged, blocks: Array, contents: Blocks) -> State:
    """Overwrite the contents of blocks."""
    caches = list(state.caches)
    for at, layer in enumerate(group.layers):
        cache: Pages = caches[layer]
        cells = contents.cells[at].transpose(1, 3, 2, 0, 4)
        cells = cells.reshape(*cells.shape[:3], -1)
        if cache.kv.dtype == BITS:
            cells = jax.lax.bitcast_convert_type(cells, BITS)
        cache = cache._replace(kv=cache.kv.at[blocks].set(cells))
        if cache.scales is not None:
            lanes = contents.scales[at].transpose(1, 3, 0, 2)
            lanes = lanes.reshape(*lanes.shape[:2], -1)
            padding = cache.scales.shape[2] - lanes.shape[2]
            lanes = jnp.pad(lanes, ((0, 0), (0, 0), (0, padding)))
            cache = cache._replace(scales=cache.scales.at[blocks].set(lanes))
        caches[layer] = cache
    return state._replace(caches=tuple(caches))


BLOCK_IO = BlockIO(read_blocks, write_blocks)


def head_dim(cache: Pages) -> int:
    """Return the size of a head."""
    return int(cache.kv.shape[3]) // 2
