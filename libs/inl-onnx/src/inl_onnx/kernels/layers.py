"""Embedding, linear layers, normalization, rotation and gated activations."""

from __future__ import annotations

import math

import numpy as np

from inl.ops.activation import check_kind
from inl.ops.embedding import Embedding
from inl.ops.heads import HeadLinear
from inl.ops.linear import Linear
from inl.ops.norm import LayerNorm, Norm
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


def layer_norm(x: Value, w: LayerNorm, *, eps: float) -> Value:
    wide = fn.upcast(x)
    centered = wide - fn.mean_of(wide, keepdims=True)
    variance = fn.mean_of(centered * centered, keepdims=True)
    y = centered / (variance + eps).node("Sqrt") * fn.upcast(w.weight)
    return (y if w.bias is None else y + fn.upcast(w.bias)).astype(x.dtype)


def head_linear(x: Value, w: HeadLinear, *, transposed: bool) -> Value:
    matrices = w.weight.reshape(x.shape[1], -1, w.weight.shape[-1])
    if not transposed:
        matrices = fn.transpose(matrices, 0, 2, 1)
    return fn.transpose(fn.matmul(fn.transpose(x, 1, 0, 2), matrices), 1, 0, 2)


def join_lanes(a: Value, b: Value) -> Value:
    return fn.concatenate([a, b], -1)


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
    active = fn.silu(wide) if activation == "silu" else _gelu_tanh(wide)
    return (active * fn.upcast(up)).astype(gate.dtype)


def _gelu_tanh(x: Value) -> Value:
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * fn.sigmoid(inner * 2.0)


def activate(x: Value, *, kind: str) -> Value:
    check_kind(kind)
    wide = fn.upcast(x)
    if kind == "gelu_tanh":
        y = _gelu_tanh(wide)
    elif kind == "gelu":
        y = wide * 0.5 * ((wide * math.sqrt(0.5)).node("Erf") + 1)
    elif kind in ("silu", "gelu_sigmoid"):
        y = wide * fn.sigmoid(wide * (1.702 if kind == "gelu_sigmoid" else 1.0))
    elif kind in ("sigmoid", "tanh"):
        y = fn.sigmoid(wide) if kind == "sigmoid" else fn.tanh(wide)
    else:
        y = fn.maximum(wide, 0)
        y = y * y if kind == "relu_squared" else y
    return y.astype(x.dtype)


def silu(x: Value) -> Value:
    return fn.silu(fn.upcast(x)).astype(x.dtype)


def sigmoid_gate(x: Value, gate: Value) -> Value:
    return (fn.upcast(x) * fn.sigmoid(fn.upcast(gate))).astype(x.dtype)


def take_rows(x: Value, index: Value) -> Value:
    return fn.take(x, index)


def temper_queries(q: Value, positions: Value, *, floor: int, gain: float) -> Value:
    steps = ((positions + 1) // floor).astype("float32")
    factor = fn.log(steps + 1.0) * gain + 1.0
    return (fn.upcast(q) * factor[:, None, None]).astype(q.dtype)


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
        layer_norm, head_linear, join_lanes, activate, temper_queries,
    )
)  # fmt: skip
