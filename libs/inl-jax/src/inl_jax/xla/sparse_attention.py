"""Sparse attention by an indexer: a choice of cached tokens, and attention over them.

Tokens are compared with their row's context in chunks, a few tokens at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from inl.spec.step import Step
from inl_jax.pages import INT8, Pages, head_dim, read_kv
from inl_jax.tensors import BITS, Array, accumulated, einsum, upcast
from inl_jax.xla.kernel import kernel

CHUNK = 1024
"""Keys that are read at once, at least a block."""
TOKENS = 16
"""Tokens that are compared at once."""


def index_topk(
    q: Array, weights: Array, cache: Pages, step: Step, *, k: int, group: int
) -> Array:
    table, size = step.blocks[group], cache.block_size
    count = max(1, min(CHUNK // size, table.shape[1]))
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % count)))
    width = table.shape[1] * size

    def compare(tokens: tuple[Array, ...]) -> Array:
        queries, factors, rows, positions = tokens
        own = table[rows]

        def chunk(index: Any, scores: Array) -> Array:
            ids = jax.lax.dynamic_slice_in_dim(own, index * count, count, axis=1)
            keys = read_kv(cache, ids)[0][:, 0, :, : q.shape[-1]]
            products = jnp.maximum(einsum("thd,tnd->thn", queries, keys), 0)
            found = einsum("th,thn->tn", upcast(factors), products)
            start = index * count * size
            return jax.lax.dynamic_update_slice_in_dim(scores, found, start, axis=1)

        scores = jnp.full((len(rows), width), -jnp.inf, accumulated(q))
        stop = (positions.max() + count * size) // (count * size)
        scores = jax.lax.fori_loop(0, stop, chunk, scores)
        seen = jnp.arange(width) <= positions[:, None]
        return chosen(jnp.where(seen, scores, -jnp.inf), k)

    used = jnp.arange(q.shape[0]) < step.used_counts[2]
    positions = jnp.where(used, step.positions, -1)
    return _in_parts(compare, (q, weights, step.rows, positions))


def chosen(scores: Array, k: int) -> Array:
    """Return the places [T, k] of the highest scores [T, n] in order; -1 is none."""
    width = scores.shape[1]
    values, ids = jax.lax.top_k(scores, min(k, width))
    ids = jnp.sort(jnp.where(values == -jnp.inf, width, ids), axis=-1)
    ids = jnp.where(ids == width, -1, ids).astype(jnp.int32)
    return jnp.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1)


def _in_parts(run: Any, given: tuple[Array, ...]) -> Array:
    """Return the results of ``run`` for all tokens, :data:`TOKENS` at a time."""
    tokens = given[0].shape[0]
    if tokens <= TOKENS:
        return run(given)
    parts = tuple(
        jnp.pad(x, ((0, -tokens % TOKENS), *((0, 0),) * (x.ndim - 1))).reshape(
            -1, TOKENS, *x.shape[1:]
        )
        for x in given
    )
    found = jax.lax.map(run, parts)
    return found.reshape(-1, *found.shape[2:])[:tokens]


def sparse_attention(
    q: Array, ids: Array, cache: Pages, step: Step, *, scale: float, group: int
) -> Array:
    table, size = step.blocks[group], cache.block_size
    used = jnp.arange(q.shape[0]) < step.used_counts[2]

    def attend(tokens: tuple[Array, ...]) -> Array:
        queries, places, rows, wanted = tokens
        valid = (places >= 0) & wanted[:, None]
        places = jnp.where(valid, places, 0)
        blocks = jnp.take_along_axis(table[rows], places // size, axis=1)
        latents = upcast(_latents(cache, blocks, places % size))
        # A cell that is not chosen may hold the NaN of an earlier request.
        latents = jnp.where(valid[..., None], latents, 0)
        scores = einsum("thd,tkd->thk", upcast(queries), latents) * scale
        scores = jnp.where(valid[:, None], scores, -1e30)
        shares = jnp.where(valid[:, None], jax.nn.softmax(scores, axis=-1), 0)
        return einsum("thk,tkd->thd", shares, latents).astype(q.dtype)

    return _in_parts(attend, (q, ids, step.rows, used))


def _latents(cache: Pages, blocks: Array, offsets: Array) -> Array:
    """Return the values of cells [T, K]: [T, K, d]."""
    dim, size = head_dim(cache), cache.block_size
    found = cache.kv[blocks, 0, offsets, dim:]
    if found.dtype == BITS:
        return jax.lax.bitcast_convert_type(found, jnp.bfloat16)
    if cache.scales is None:
        return found
    assert found.dtype == INT8
    return upcast(found) * cache.scales[blocks, 0, size + offsets][..., None]


KERNELS = (kernel(index_topk), kernel(sparse_attention))
