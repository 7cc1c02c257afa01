"""The array namespace of :mod:`inl.backend.traced`, of JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import log_softmax as log_softmax
from jax.nn import sigmoid as sigmoid
from jax.nn import silu as silu
from jax.nn import softmax as softmax
from jax.numpy import broadcast_to as broadcast_to
from jax.numpy import clip as clip
from jax.numpy import concatenate as concatenate
from jax.numpy import equal as equal
from jax.numpy import exp as exp
from jax.numpy import isnan as isnan
from jax.numpy import maximum as maximum
from jax.numpy import minimum as minimum
from jax.numpy import where as where

from inl_jax.tensors import Array, einsum
from inl_jax.tensors import upcast as upcast
from inl_jax.xla.moe import expert_product as expert_product


def arange(_like: Array, stop: int, start: int = 0) -> Array:
    return jnp.arange(start, stop, dtype=jnp.int32)


def full(_like: Array, shape: Sequence[int], fill: float, dtype: Any) -> Array:
    return jnp.full(tuple(shape), fill, dtype)


def split(x: Array, parts: int) -> Sequence[Array]:
    return jnp.split(x, parts, axis=-1)


def transpose(x: Array, *axes: int) -> Array:
    return jnp.transpose(x, axes)


def take(x: Array, index: Array, axis: int = 0) -> Array:
    return x[(slice(None),) * axis + (index,)]


def take_along(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=-1, mode="promise_in_bounds")


def pick(x: Array, first: Array, second: Array) -> Array:
    return x[..., first, second]


def put(
    x: Array, indices: Sequence[Array], values: Array, *, add: bool = False
) -> Array:
    at = x.at[tuple(indices)]
    return at.add(values) if add else at.set(values)


def put_columns(x: Array, index: Array, values: Array) -> Array:
    return x.at[:, index].set(values)


def unsorted(order: Array, x: Array) -> Array:
    rows = jnp.arange(len(x))[:, None]
    return jnp.zeros_like(x).at[rows, order].set(x)


def counted(
    table: Array, slots: Array | None, ids: Array, amounts: Array, times: int = 1
) -> Array:
    rows = jnp.arange(len(table)) if slots is None else slots
    return table.at[rows[:, None], ids].add(times * amounts.astype(table.dtype))


def sum_of(x: Array, axis: int = -1, *, keepdims: bool = False) -> Array:
    return x.sum(axis, dtype=x.dtype, keepdims=keepdims)


def mean_of(x: Array, axis: int = -1) -> Array:
    return x.mean(axis)


def max_of(x: Array, *, keepdims: bool = False) -> Array:
    return x.max(-1, keepdims=keepdims)


def has_finite_max(x: Array) -> Array:
    return jnp.isfinite(x.max(-1, keepdims=True))


def any_of(x: Array, axis: int = -1, *, keepdims: bool = False) -> Array:
    return x.any(axis, keepdims=keepdims)


def cumsum(x: Array, axis: int = -1) -> Array:
    return jnp.cumsum(x, axis=axis)


def argmax(x: Array) -> Array:
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def top(x: Array, count: int) -> Array:
    # XLA sorts -0.0 below 0.0; adding zero makes them one.
    order = jnp.argsort(-(x + 0.0), axis=-1, stable=True)
    return order[..., :count].astype(jnp.int32)


def largest(x: Array, count: int) -> Array:
    return jnp.sort(x, axis=-1)[..., -count:]


def one_hot(ids: Array, count: int, dtype: str = "float32") -> Array:
    return (ids[..., None] == jnp.arange(count)).astype(dtype)


def product(x: Array, weight: Array) -> Array:
    return einsum("...k,nk->...n", x, weight)


def floats(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
