"""Attention by tiles on JAX arrays, in a program whose size is that of one tile."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from inl.spec.attention_pattern import HIDDEN, AttentionPattern
from inl_jax.tensors import Array

State = tuple[Array, Array, Array]
"""Of each query: its largest score, the sum of its weights, its weighted values."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    pattern: AttentionPattern,
    *,
    mask: Array | None = None,
    precision: str | None = None,
) -> Array:
    """Attention of scaled queries [..., L, d], with memory for one tile of scores.

    Differentiable any number of times; the derivative computes a row of tiles again.
    mask: as of :func:`inl.kernels.flash_attention`. precision: of the products.
    """
    wanted = pattern.tiles().wanted
    visits = None if wanted.all() else jnp.asarray(wanted)
    # Programs are found again by the pattern, which has to have a hash.
    return _attend(q, k, v, mask, visits, pattern._replace(blocks=None), precision)


@partial(jax.jit, static_argnums=(5, 6))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    wanted: Array | None,
    pattern: AttentionPattern,
    precision: str | None,
) -> Array:
    """wanted: [rows, columns], the tiles to compute; ``None``: all."""
    size = pattern.size
    queries = _tiles(q, -2, size)
    keys, values = _tiles(k, -2, size), _tiles(v, -2, size)
    shape = (*q.shape[:-2], size)
    cells = jnp.arange(size)

    def add(row: Array, column: Array, state: State, given: tuple[Any, ...]) -> State:
        x, y, z, tile = given
        scores = jnp.matmul(x, jnp.swapaxes(y, -1, -2), precision=precision)
        scores = _masked(scores, tile)
        at = column * size + cells
        seen = pattern.seen((row * size + cells)[:, None], at)
        if pattern.keys % size:
            inside = at < pattern.keys
            seen = inside if seen is None else seen & inside
        if seen is not None:
            scores = jnp.where(seen, scores, HIDDEN)
        top, total, result = state
        # Results do not depend on it, nor do their derivatives.
        new = jax.lax.stop_gradient(jnp.maximum(top, scores.max(-1)))
        weights = jnp.exp(scores - new[..., None]) * (scores > HIDDEN / 2)
        shrink = jnp.exp(top - new)
        product = jnp.matmul(weights, z, precision=precision)
        return (
            new,
            total * shrink + weights.sum(-1),
            result * shrink[..., None] + product,
        )

    @jax.checkpoint
    def attend_row(row: Array, x: Array, mask: Array | None) -> Array:
        chosen = None if wanted is None else wanted[row]

        def step(state: State, given: tuple[Any, ...]) -> tuple[State, None]:
            column, keep, *rest = given
            operands = (x, *rest)
            if keep is None:
                return add(row, column, state, operands), None
            return jax.lax.cond(
                keep, lambda: add(row, column, state, operands), lambda: state
            ), None

        none = jnp.zeros(shape, q.dtype)
        start = none + HIDDEN, none, jnp.zeros((*shape, v.shape[-1]), q.dtype)
        tiles = None
        if mask is not None and mask.shape[-1] != 1:
            tiles = _tiles(mask, -1, size)

        def each(state: State, given: tuple[Any, ...]) -> tuple[State, None]:
            *rest, tile = given
            return step(state, (*rest, mask if tile is None else tile))

        columns = jnp.arange(len(keys))
        (_, total, result), _ = jax.lax.scan(
            each, start, (columns, chosen, keys, values, tiles)
        )
        return result / jnp.where(total > 0, total, 1)[..., None]

    parts = None
    if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1:
        parts = _tiles(mask, -2, size)

    def each_row(_: None, given: tuple[Array, Array, Array | None]) -> Any:
        row, x, part = given
        return None, attend_row(row, x, mask if part is None else part)

    _, rows = jax.lax.scan(each_row, None, (jnp.arange(len(queries)), queries, parts))
    joined = jnp.moveaxis(rows, 0, -3)
    joined = joined.reshape(*joined.shape[:-3], -1, joined.shape[-1])
    return joined[..., : pattern.length, :]


def _tiles(x: Array, axis: int, size: int) -> Array:
    """Split an axis into tiles, the first axis of the result, filled with zeros."""
    axis += x.ndim
    pad = [(0, 0)] * x.ndim
    pad[axis] = 0, -x.shape[axis] % size
    filled = jnp.pad(x, pad)
    split = filled.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


def _masked(scores: Array, mask: Array | None) -> Array:
    if mask is None:
        return scores
    if mask.dtype == bool:
        return jnp.where(mask, scores, HIDDEN)
    return jnp.maximum(scores + mask.astype(scores.dtype), HIDDEN)
