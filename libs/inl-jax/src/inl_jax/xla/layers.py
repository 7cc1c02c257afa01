"""Embedding, linear layers, normalization, rotation and gated activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inl.ops.activation import check_kind
from inl.ops.embedding import Embedding
from inl.ops.heads import HeadLinear
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm, Norm
from inl.ops.rope import RopeScaling, frequencies, gains
from inl.ops.xielu import Xielu
from inl_jax.tensors import Array, einsum, upcast
from inl_jax.xla.kernel import kernel


def embedding(tokens: Array, w: Embedding) -> Array:
    return w.weight[tokens]


SUBLANES = 8
"""Rows of a TPU's registers."""


def linear(x: Array, w: Linear) -> Array:
    y = product(x, w.weight)
    return (y if w.bias is None else y + w.bias).astype(x.dtype)


def product(x: Array, weight: Array) -> Array:
    """Multiply ``x`` [T, K] by a matrix [N, K] transposed, in float32."""

    def plain(x: Array, weight: Array) -> Array:
        return einsum("...k,nk->...n", x, weight)

    def padded(x: Array, weight: Array) -> Array:
        return plain(jnp.pad(x, ((0, SUBLANES - len(x)), (0, 0))), weight)[: len(x)]

    if x.ndim != 2 or len(x) >= SUBLANES:
        return plain(x, weight)
    # On a TPU, XLA multiplies a single row outside of the matrix unit.
    return jax.lax.platform_dependent(x, weight, tpu=padded, default=plain)


def soft_cap(x: Array, *, cap: float) -> Array:
    return (cap * jnp.tanh(upcast(x) / cap)).astype(x.dtype)


def rms_norm(x: Array, w: Norm, *, eps: float) -> Array:
    wide = upcast(x)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + eps) * upcast(w.weight)).astype(x.dtype)


def layer_norm(x: Array, w: LayerNorm, *, eps: float) -> Array:
    wide = upcast(x)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    y = centered * jax.lax.rsqrt(variance + eps) * upcast(w.weight)
    return (y if w.bias is None else y + upcast(w.bias)).astype(x.dtype)


def head_linear(x: Array, w: HeadLinear, *, transposed: bool) -> Array:
    matrices = w.weight.reshape(x.shape[1], -1, w.weight.shape[-1])
    form = "thn,hnk->thk" if transposed else "thk,hnk->thn"
    # XLA for CPUs has no batched product of two bfloat16 matrices.
    return einsum(form, upcast(x), upcast(matrices)).astype(x.dtype)


def join_lanes(a: Array, b: Array) -> Array:
    return jnp.concatenate([a, b], axis=-1)


def rope_table(
    positions: Array, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[Array, Array]:
    """Cosines and sines, exact in float32 at every position.

    An angle in float32 would be wrong in the fourth digit at position 8192. The turns
    per position are fixed-point fractions of 64 bits: the product of the high half with
    the position wraps at whole turns, and that of the low half is small.
    """
    rates = frequencies(dim, theta, scaling)
    fractions = [int(rate / (2 * math.pi) % 1 * 2**64) for rate in rates.tolist()]
    high = np.array([fraction >> 32 for fraction in fractions], np.uint32)
    low = np.array([fraction & 0xFFFFFFFF for fraction in fractions], np.float64)
    wrapped = positions[:, None] * high.view(np.int32)
    rest = positions[:, None].astype(jnp.float32) * (low * 2.0**-64).astype(np.float32)
    turns = wrapped.astype(jnp.float32) * np.float32(2.0**-32) + rest
    angles = turns * np.float32(2 * math.pi)
    gain = np.asarray(gains(dim, scaling), np.float32)
    return jnp.cos(angles) * gain, jnp.sin(angles) * gain


def rope(q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(upcast(x), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


def gated_activation(gate: Array, up: Array, *, activation: str) -> Array:
    wide = upcast(gate)
    active = jax.nn.silu(wide) if activation == "silu" else _gelu_tanh(wide)
    return (active * upcast(up)).astype(gate.dtype)


def _gelu_tanh(x: Array) -> Array:
    # As 1 + tanh(x) = 2 sigmoid(2 x), which does not cancel for negative x.
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * jax.nn.sigmoid(2 * inner)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": lambda x: 0.5 * x * jax.lax.erfc(x * -math.sqrt(0.5)),
    "gelu_sigmoid": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def activate(x: Array, *, kind: str) -> Array:
    check_kind(kind)
    return ACTIVATIONS[kind](upcast(x)).astype(x.dtype)


def xielu(x: Array, w: Xielu) -> Array:
    wide, (positive, negative, slope) = upcast(x), map(upcast, w)
    bent = (jnp.expm1(jnp.minimum(wide, 0)) - wide) * negative
    bent = jnp.where(wide > 0, positive * wide * wide, bent)
    return (bent + slope * wide).astype(x.dtype)


def silu(x: Array) -> Array:
    return jax.nn.silu(upcast(x)).astype(x.dtype)


def sigmoid_gate(x: Array, gate: Array) -> Array:
    return (upcast(x) * jax.nn.sigmoid(upcast(gate))).astype(x.dtype)


def take_rows(x: Array, index: Array) -> Array:
    return x[index]


def temper_queries(q: Array, positions: Array, *, floor: int, gain: float) -> Array:
    factor = 1 + gain * jnp.log1p(((positions + 1) // floor).astype(jnp.float32))
    return (q * factor[:, None, None]).astype(q.dtype)


def clip(x: Array, *, low: float, high: float) -> Array:
    return jnp.clip(x, low, high)


def all_reduce(x: Array, *, axis: str) -> Array:  # noqa: ARG001
    return x


def all_gather(x: Array, *, axis: str) -> Array:  # noqa: ARG001
    return x


def zeros_like(x: Any) -> Array:
    return jnp.zeros_like(x)


KERNELS = tuple(
    kernel(run)
    for run in (
        embedding, linear, soft_cap, rms_norm, rope_table, rope, gated_activation,
        silu, sigmoid_gate, take_rows, clip, all_reduce, all_gather, zeros_like,
        layer_norm, head_linear, join_lanes, activate, temper_queries, xielu,
    )
)  # fmt: skip
