"""Functions of graph values, named and behaving as NumPy's where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from inl_onnx.graph import Value


def upcast(x: Value) -> Value:
    """Convert float16 to float32."""
    return x.astype("float32") if x.dtype == "float16" else x


def arange(like: Value, stop: int, start: int = 0) -> Value:
    """Return the constant int32 ``start .. stop - 1`` in the graph of ``like``."""
    return like.graph.constant(np.arange(start, stop), "int32")


def full(like: Value, shape: Sequence[int], fill: float, dtype: str) -> Value:
    """Return a constant array."""
    return like.graph.constant(np.full(tuple(shape), fill), dtype)


def where(condition: Value, x: Any, y: Any) -> Value:
    """Choose elementwise; one of ``x`` and ``y`` may be a number."""
    dtype = x.dtype if isinstance(x, Value) else y.dtype
    x, y = (
        each if isinstance(each, Value) else condition.graph.constant(each, dtype)
        for each in (x, y)
    )
    shape = np.broadcast_shapes(condition.shape, x.shape, y.shape)
    return condition.node("Where", x, y, dtype=dtype, shape=shape)


def maximum(x: Value, y: Any) -> Value:
    return _pair("Max", x, y)


def minimum(x: Value, y: Any) -> Value:
    return _pair("Min", x, y)


def _pair(op: str, x: Value, y: Any) -> Value:
    y = y if isinstance(y, Value) else x.graph.constant(y, x.dtype)
    return x.node(op, y, shape=np.broadcast_shapes(x.shape, y.shape))


def clip(x: Value, low: Any, high: Any) -> Value:
    return minimum(maximum(x, low), high)


def concatenate(parts: Sequence[Value], axis: int) -> Value:
    shape = list(parts[0].shape)
    axis %= len(shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return parts[0].node("Concat", *parts[1:], shape=shape, axis=axis)


def split(x: Value, parts: int) -> list[Value]:
    """Split the last axis to equal parts."""
    size = x.shape[-1] // parts
    return [x[..., index * size : (index + 1) * size] for index in range(parts)]


def transpose(x: Value, *axes: int) -> Value:
    shape = [x.shape[axis] for axis in axes]
    return x.node("Transpose", shape=shape, perm=list(axes))


def broadcast_to(x: Value, shape: Sequence[int]) -> Value:
    if tuple(shape) == x.shape:
        return x
    target = x.graph.constant(list(shape), "int64")
    return x.node("Expand", target, shape=shape)


def take(x: Value, index: Value, axis: int = 0) -> Value:
    """Return the entries of an axis at ``index``, any shape."""
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return x.node("Gather", index, shape=shape, axis=axis)


def take_along(x: Value, index: Value) -> Value:
    """As ``take_along_axis`` on the last axis."""
    return x.node("GatherElements", index, shape=index.shape, axis=-1)


def pick(x: Value, first: Value, second: Value) -> Value:
    """Return ``x[..., first, second]`` for two index arrays of one shape."""
    flat = x.reshape(*x.shape[:-2], -1)
    return take(flat, first * x.shape[-1] + second, flat.ndim - 1)


def put(x: Value, indices: Sequence[Value], values: Value, *, add: bool = False) -> Any:
    """Return ``x`` with entries replaced, or added to, at indices of leading axes."""
    if not x.size:
        return x
    shape = np.broadcast_shapes(*(index.shape for index in indices))
    columns = [
        broadcast_to(i, shape).reshape(*shape, 1).astype("int64") for i in indices
    ]
    at = concatenate(columns, -1) if len(columns) > 1 else columns[0]
    values = broadcast_to(values, (*shape, *x.shape[len(indices) :]))
    return x.node("ScatterND", at, values, reduction="add" if add else "none")


def put_columns(x: Value, index: Value, values: Value) -> Value:
    """Return ``x`` with the entries of axis 1 at ``index`` [M] replaced."""
    rows = arange(x, x.shape[0])[:, None]
    replaced: Value = put(x, [rows, index], values)
    return replaced


def unsorted(order: Value, x: Value) -> Value:
    """Return bool ``x``, in which column ``i`` is column ``order[:, i]``, in order."""
    zeros = full(x, x.shape, 0, "int32")
    ones = x.astype("int32")
    return zeros.node("ScatterElements", order, ones, axis=-1) > 0


def equal(x: Value, y: Any) -> Value:
    return x.equal(y)


def matmul(x: Value, y: Value) -> Value:
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return x.node("MatMul", y, shape=(*batch, x.shape[-2], y.shape[-1]))


def sum_of(x: Value, axis: int = -1, *, keepdims: bool = False) -> Value:
    return _reduce("ReduceSum", x, axis, keepdims)


def mean_of(x: Value, axis: int = -1, *, keepdims: bool = False) -> Value:
    return _reduce("ReduceMean", x, axis, keepdims)


def max_of(x: Value, axis: int = -1, *, keepdims: bool = False) -> Value:
    return _reduce("ReduceMax", x, axis, keepdims)


def has_finite_max(x: Value) -> Value:
    """Return whether the largest entry of the last axis, which stays, is finite."""
    # ``ReduceMax`` may ignore NaN.
    return ~isinf(max_of(where(isnan(x), np.inf, x), keepdims=True))


def any_of(x: Value, axis: int = -1, *, keepdims: bool = False) -> Value:
    counts = _reduce("ReduceMax", x.astype("int32"), axis, keepdims)
    return counts > 0


def _reduce(op: str, x: Value, axis: int, keepdims: bool) -> Value:
    axis %= x.ndim
    kept = [1] if keepdims else []
    shape = [*x.shape[:axis], *kept, *x.shape[axis + 1 :]]
    axes = x.graph.constant([axis], "int64")
    return x.node(op, axes, shape=shape, keepdims=int(keepdims))


def cumsum(x: Value, axis: int = -1) -> Value:
    return x.node("CumSum", x.graph.constant(axis % x.ndim, "int64"))


def argmax(x: Value) -> Value:
    """Index of the largest entry of the last axis, ties to the lowest: int32."""
    found = x.node("ArgMax", dtype="int64", shape=x.shape[:-1], axis=-1, keepdims=0)
    return found.astype("int32")


def top(x: Value, count: int) -> Value:
    """Indices of the largest entries of the last axis, ties to the lowest: int32."""
    return _top(x, count)[1].astype("int32")


def largest(x: Value, count: int) -> Value:
    """Return the largest entries of the last axis."""
    return _top(x, count)[0]


def _top(x: Value, count: int) -> list[Value]:
    shape = (*x.shape[:-1], count)
    k = x.graph.constant([count], "int64")
    results = [(x.dtype, shape), ("int64", shape)]
    return x.graph.add("TopK", [x, k], results, axis=-1, largest=1, sorted=1)


def isnan(x: Value) -> Value:
    return x.node("IsNaN", dtype="bool")


def isinf(x: Value) -> Value:
    return x.node("IsInf", dtype="bool")


def exp(x: Value) -> Value:
    return x.node("Exp")


def log(x: Value) -> Value:
    return x.node("Log")


def tanh(x: Value) -> Value:
    return x.node("Tanh")


def sigmoid(x: Value) -> Value:
    """By its definition: ``Sigmoid`` of the CPU has few digits far below zero."""
    one = x.graph.constant(1, x.dtype)
    return one / (exp(-x) + 1)


def softplus(x: Value) -> Value:
    return x.node("Softplus")


def silu(x: Value) -> Value:
    return x * sigmoid(x)


def softmax(x: Value) -> Value:
    """Softmax over the last axis."""
    return x.node("Softmax", axis=-1)


def log_softmax(x: Value) -> Value:
    return x.node("LogSoftmax", axis=-1)


def one_hot(ids: Value, count: int, dtype: str = "float32") -> Value:
    """Return ``ids == 0 .. count - 1`` on a new last axis."""
    return ids[..., None].equal(arange(ids, count)).astype(dtype)


def counted(
    table: Value, slots: Value | None, ids: Value, amounts: Value, times: int = 1
) -> Value:
    """Add ``times * amounts`` [R, M] to columns ``ids`` [R, M] of ``table``'s rows.

    slots: the rows [R]; ``None`` is all of them, in order. A product with ones, since
    additions of a scatter to the same cell may be lost.
    """
    wide = amounts.astype("float32")[..., None, :]
    totals = matmul(wide, one_hot(ids, table.shape[1]))[..., 0, :].astype(table.dtype)
    totals = totals if times == 1 else totals * times
    if slots is None:
        return table + totals
    return put(table, [slots], take(table, slots) + totals)


def product(x: Value, weight: Value) -> Value:
    """``x`` [T, K] @ ``weight`` [N, K].T in float32."""
    return matmul(upcast(x), transpose(upcast(weight), 1, 0))


def expert_product(x: Value, ids: Value, weight: Value) -> Value:
    """Multiply row s of ``x`` [S, K] by ``weight[ids[s]]`` [K, N]: [S, N].

    As many copies of a matrix as there are rows, if these are fewer than the experts;
    otherwise every row by every expert, of which one is kept.
    """
    if ids.shape[0] <= weight.shape[0]:
        return matmul(x[:, None], take(weight, ids))[:, 0]
    result = full(x, (x.shape[0], weight.shape[2]), 0, x.dtype)
    for expert in range(weight.shape[0]):
        chosen = ids.equal(expert)[:, None]
        result = where(chosen, matmul(x, weight[expert]), result)
    return result


def floats(bits: Value) -> Value:
    """Return int32 bits as the float32 that they encode; infinities become finite.

    Assembled from sign, exponent and fraction: bit casts are not in this opset.
    """
    fraction = bits & 0x7FFFFF
    exponent = (bits & 0x7FFFFFFF) // (1 << 23)
    powers = np.ldexp(np.float32(1), np.maximum(np.arange(256) - 150, -149))
    powers[255] = powers[254]
    scale = take(bits.graph.constant(powers, "float32"), exponent)
    whole = where(exponent > 0, fraction + (1 << 23), fraction).astype("float32")
    return where(bits < 0, -whole, whole) * scale
