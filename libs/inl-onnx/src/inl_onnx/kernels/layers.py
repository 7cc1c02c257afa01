"""Embedding, linear layers, normalization, rotation and gated activations."""

from __future__ import annotations

import math

import numpy as np

from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling, frequencies, gains
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel

DIGIT = 10
"""Bits of a position that :func:`rope_table` multiplies at a time."""

HALF = 2**13
"""Steps of the first part of a rate: times a digit it is exact in float32."""


def embedding(tokens: Value, w: Embedding) -> Value:
    return fn.take(w.weight, tokens)


def linear(x: Value, w: Linear) -> Value:
    return product(x, w.weight, w.bias)


def product(x: Value, weight: Value, bias: Value | None = None) -> Value:
    """``x`` [..., K] @ ``weight`` [N, K].T + ``bias`` [N]: [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    operands = [weight] if bias is None else [weight, bias]
    shape = rows.shape[0], weight.shape[0]
    y = rows.node("Gemm", *operands, shape=shape, transB=1)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def soft_cap(x: Value, *, cap: float) -> Value:
    return (fn.tanh(fn.upcast(x) / cap) * cap).astype(x.dtype)


def rms_norm(x: Value, w: Norm, *, eps: float) -> Value:
    wide = fn.upcast(x)
    mean = fn.mean_of(wide * wide, keepdims=True)
    normed = wide / (mean + eps).node("Sqrt")
    return (normed * fn.upcast(w.weight)).astype(x.dtype)


def rope_table(
    positions: Value, *, dim: int, theta: float, scaling: RopeScaling
) -> tuple[Value, Value]:
    """Cosines and sines, exact in float32 at every position.

    An angle in float32 would be wrong in the fourth digit at position 8192. Digits of
    the position are multiplied with their turns, of which whole ones are dropped; the
    first part of each product is exact, and the second is small.
    """
    rates = [rate / (2 * math.pi) for rate in frequencies(dim, theta, scaling).tolist()]
    turns, rest = None, positions[:, None]
    for digit in range(0, 31, DIGIT):
        part = (rest % (1 << DIGIT)).astype("float32")
        rest = rest // (1 << DIGIT)
        exact = np.array([rate * 2**digit % 1 for rate in rates])
        first = np.floor(exact * HALF) / HALF
        whole = part * first.astype(np.float32)
        whole = whole - whole.node("Floor")
        total = whole + part * (exact - first).astype(np.float32)
        turns = total if turns is None else turns + total
    assert turns is not None, "positions have digits"
    gain = np.asarray(gains(dim, scaling), np.float32)
    cos, sin = cos_and_sin(turns)
    return cos * gain, sin * gain


def cos_and_sin(turns: Value) -> tuple[Value, Value]:
    """Cosine and sine of an angle in turns, by their series up to an eighth of one.

    The ``Cos`` and ``Sin`` of GPUs may have an absolute error of 2**-11.
    """
    quarters = (turns * 4).node("Round")
    angle = (turns - quarters * 0.25) * np.float32(2 * math.pi)
    square = angle * angle
    sin = angle * series(square, [1, -6, 120, -5040, 362880])
    cos = series(square, [1, -2, 24, -720, 40320, -3628800])
    phase = quarters - (quarters * 0.25).node("Floor") * 4
    odd = fn.where(phase > 1.5, phase - 2, phase) > 0.5
    negative_cos = (phase > 0.5) & (phase < 2.5)
    first, second = fn.where(odd, sin, cos), fn.where(odd, cos, sin)
    return (
        fn.where(negative_cos, -first, first),
        fn.where(phase > 1.5, -second, second),
    )


def series(x: Value, divisors: list[int]) -> Value:
    """Return the sum of ``x ** n / divisors[n]``."""
    total = x * (1 / divisors[-1])
    for divisor in divisors[-2:0:-1]:
        total = (total + 1 / divisor) * x
    return total + 1 / divisors[0]


def rope(q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Value, cos: Value, sin: Value) -> Value:
    a, b = fn.split(fn.upcast(x), 2)
    cos, sin = cos[:, None], sin[:, None]
    return fn.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def gated_activation(gate: Value, up: Value, *, activation: str) -> Value:
    wide = fn.upcast(gate)
    if activation == "silu":
        active = fn.silu(wide)
    else:
        # As 1 + tanh(x) = 2 sigmoid(2 x), which does not cancel for negative x.
        inner = (wide + wide * wide * wide * 0.044715) * math.sqrt(2 / math.pi)
        active = wide * fn.sigmoid(inner * 2.0)
    return (active * fn.upcast(up)).astype(gate.dtype)


def silu(x: Value) -> Value:
    return fn.silu(fn.upcast(x)).astype(x.dtype)


def sigmoid_gate(x: Value, gate: Value) -> Value:
    return (fn.upcast(x) * fn.sigmoid(fn.upcast(gate))).astype(x.dtype)


def take_rows(x: Value, index: Value) -> Value:
    return fn.take(x, index)


def clip(x: Value, *, low: float, high: float) -> Value:
    return fn.clip(x, low, high)


def all_reduce(x: Value, *, axis: str) -> Value:  # noqa: ARG001
    return x


def all_gather(x: Value, *, axis: str) -> Value:  # noqa: ARG001
    return x


def zeros_like(x: Value) -> Value:
    return fn.full(x, x.shape, 0, x.dtype)


KERNELS = tuple(
    kernel(run)
    for run in (
        embedding, linear, soft_cap, rms_norm, rope_table, rope, gated_activation,
        silu, sigmoid_gate, take_rows, clip, all_reduce, all_gather, zeros_like,
    )
)  # fmt: skip
