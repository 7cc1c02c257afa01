"""Attention by tiles on JAX arrays, in a program whose size is that of one tile."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from inl.spec.attention_pattern import HIDDEN, AttentionPattern
from inl.spec.explained import RECORDS, refuse, report
from inl_jax.tensors import Array, upcast
from inl_jax.xla import cudnn_attention

LARGE_TILE = 512
"""Least tile on a GPU or a TPU, but of fewer queries and keys."""

ROUND = 16
"""What a tile of fewer queries and keys is a multiple of."""

State = tuple[Array, Array, Array]
"""Of each query: its largest score, the sum of its weights, its weighted values."""


def attend(
    q: Array,
    k: Array,
    v: Array,
    pattern: AttentionPattern,
    *,
    mask: Array | None = None,
    scale: float,
    inputs: str = "",
    precision: str | None = None,
) -> Array:
    """Attention of queries [..., L, d], with memory for one tile of scores.

    On NVIDIA GPUs by cuDNN where its kernel computes the same.

    Differentiable any number of times; the derivative computes a row of tiles again.
    mask: as of :func:`inl.kernels.flash_attention`. inputs: dtype that the operands of
    products have on accelerators. precision: of the products.
    """
    dtype, on_cpu = q.dtype, jax.default_backend() == "cpu"
    if inputs and not on_cpu:
        q, k, v = (each.astype(inputs) for each in (q, k, v))
    else:
        q, k, v = map(upcast, (q, k, v))
        q, scale = q * scale, 1.0
    if pattern.blocks is None:
        # Each step is a few launches, and 128 rows are too few for a GPU or a TPU.
        size = pattern.size if on_cpu else max(pattern.size, LARGE_TILE)
        longest = max(pattern.length, pattern.keys)
        pattern = pattern._replace(size=min(size, -(-longest // ROUND) * ROUND))
    why = cudnn_attention.why_not(q, v, pattern, mask, scale, precision)
    if RECORDS:
        refuse("attention/cudnn", why)
        name = f"attention/xla, tiles of {pattern.size}" if why else "attention/cudnn"
        report(name, f"{q.dtype} operands, softmax in float32 or wider")
    if not why:
        return cudnn_attention.attend(q, k, v, pattern, scale).astype(dtype)
    y = attend_by_tiles(q, k, v, pattern, mask, scale, precision)
    return y.astype(dtype)


def attend_by_tiles(
    q: Array,
    k: Array,
    v: Array,
    pattern: AttentionPattern,
    mask: Array | None,
    scale: float,
    precision: str | None,
) -> Array:
    """Compute :func:`attend`, but for conversions."""
    wanted = pattern.tiles().wanted
    visits = None if wanted.all() else jnp.asarray(wanted)
    # Programs are found again by the pattern, which has to have a hash.
    pattern = pattern._replace(blocks=None)
    return _attend(q, k, v, mask, visits, scale, pattern, precision)


@partial(jax.jit, static_argnums=(6, 7))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    wanted: Array | None,
    scale: Any,
    pattern: AttentionPattern,
    precision: str | None,
) -> Array:
    """wanted: [rows, columns], the tiles to compute; ``None``: all."""
    size = pattern.size
    queries = _tiles(q, -2, size)
    keys, values = _tiles(k, -2, size), _tiles(v, -2, size)
    shape = (*q.shape[:-2], size)
    cells, sums = jnp.arange(size), upcast(q).dtype
    product = partial(jnp.matmul, precision=precision, preferred_element_type=sums)

    def add(row: Array, column: Array, state: State, given: tuple[Any, ...]) -> State:
        x, y, z, tile = given
        scores = product(x, jnp.swapaxes(y, -1, -2)) * scale
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
        part = product(weights.astype(z.dtype), z)
        return (
            new,
            total * shrink + weights.sum(-1),
            result * shrink[..., None] + part,
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

        none = jnp.zeros(shape, sums)
        start = none + HIDDEN, none, jnp.zeros((*shape, v.shape[-1]), sums)
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
