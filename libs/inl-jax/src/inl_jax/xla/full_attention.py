"""Attention within whole sequences, in both directions; pooling of sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from inl.ops.full_attention import DistanceBias
from inl.ops.pool import check_pooling
from inl_jax.tensors import Array, einsum, upcast
from inl_jax.xla.kernel import kernel

TILE = 128
"""Queries whose scores are in memory at once."""

MASKED = -1e30


def full_attention(
    q: Array, k: Array, v: Array, starts: Array, *, scale: float, window: int | None
) -> Array:
    return _attend(q, k, v, starts, scale, window, None)


def biased_attention(
    q: Array, k: Array, v: Array, starts: Array, w: DistanceBias, *, scale: float
) -> Array:
    return _attend(q, k, v, starts, scale, None, w.weight)


def _attend(
    q: Array, k: Array, v: Array, starts: Array, scale: float, window: int | None,
    bias: Any,
) -> Array:  # fmt: skip
    """Compute tiles of queries, each over all keys."""
    tokens, heads, dim = q.shape
    sequence = _sequences(starts, tokens)
    index = jnp.arange(tokens)

    def tile(at: Any) -> Array:
        queries = q[at].reshape(len(at), k.shape[1], -1, dim)
        scores = einsum("qhgd,khd->hgqk", queries, k) * scale
        distance = index - at[:, None]
        if bias is not None:
            most = bias.shape[0] // 2
            added = upcast(bias)[jnp.clip(distance, -most, most) + most]
            scores += added.transpose(2, 0, 1).reshape(scores.shape)
        seen = sequence == sequence[at][:, None]
        if window is not None:
            seen &= jnp.abs(distance) <= window
        weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1)
        return einsum("hgqk,khd->qhgd", weights, upcast(v)).reshape(len(at), heads, dim)

    size = min(TILE, tokens)
    places = jnp.arange(tokens + -tokens % size).reshape(-1, size)
    out = jax.lax.map(tile, jnp.minimum(places, tokens - 1))
    out = out.reshape(-1, heads, dim)[:tokens]
    used = sequence < starts.shape[0] - 1
    return jnp.where(used[:, None, None], out, 0).astype(q.dtype)


def _sequences(starts: Array, tokens: int) -> Array:
    """Return the sequence of each token, N for a token of none."""
    return (jnp.arange(tokens)[:, None] >= starts[1:]).sum(1)


def pool(x: Array, starts: Array, *, kind: str) -> Array:
    check_pooling(kind)
    first, end = starts[:-1], starts[1:]
    counts = (end - first)[:, None]
    if kind != "mean":
        at = jnp.clip(first if kind == "first" else end - 1, 0, len(x) - 1)
        return jnp.where(counts > 0, x[at], 0)
    own = _sequences(starts, len(x)) == jnp.arange(len(first))[:, None]
    wide = upcast(x)
    return (einsum("nt,th->nh", own.astype(wide.dtype), wide)
            / jnp.maximum(counts, 1)).astype(x.dtype)  # fmt: skip


def unit_rows(x: Array) -> Array:
    wide = upcast(x)
    length = jnp.sqrt(jnp.square(wide).sum(-1, keepdims=True))
    return (wide / jnp.maximum(length, 1e-12)).astype(x.dtype)


KERNELS = tuple(
    kernel(run) for run in (full_attention, biased_attention, pool, unit_rows)
)
