"""Kernels of attention: a graph writes a layer's cache and reads it in one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from openvino import opset15 as ops

from inl.errors import DeviceError
from inl_intel.openvino.graph import Value


class Layer(NamedTuple):
    """The cache of a layer in a graph: its number, and what is to be written to it."""

    number: int
    k: Any = None
    v: Any = None


def write_kv(k: Value, v: Value, cache: Layer, writes: Any) -> Layer:  # noqa: ARG001
    return cache._replace(k=k, v=v)


def attention(
    q: Value,
    cache: Layer,
    step: Any,  # noqa: ARG001
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    group: int,
) -> Value:
    whole, rows = q.source or (q, None)
    if cache.k is None or whole.shape[0] != cache.k.shape[0]:
        raise DeviceError(
            "attention: a graph of OpenVINO writes a cache and reads it at once, but "
            "this model attends without writing its keys"
        )
    out = whole.graph.attend(
        whole, cache.k, cache.v, layer=cache.number, group=group, scale=scale,
        window=window, cap=cap,
    )  # fmt: skip
    return out if rows is None else take(out, rows)


def take(x: Value, index: Value) -> Value:
    """Return the rows at ``index``, and where they come from.

    An index without an output is that of all rows.
    """
    if index.output is None:
        return x
    taken = ops.gather(x.output, index.output, ops.constant(np.int32(0)))
    shape = index.shape[0], *x.shape[1:]
    return Value(x.graph, taken.output(0), x.dtype, shape, source=(x, index))
