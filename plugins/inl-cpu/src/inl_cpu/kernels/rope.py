"""Rotary position embedding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops.rope import RopeScaling, frequencies
from inl.spec.kernel import Kernel
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import Rope, RopeTable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import CommandEmitter


def rope_table(
    emitter: CommandEmitter,
    positions: Any,
    *,
    dim: int,
    theta: float,
    scaling: RopeScaling,
) -> tuple[Any, Any]:
    rates = np.ascontiguousarray(frequencies(dim, theta, scaling), np.float64)
    shape = (*positions.shape, dim // 2)
    cos, sin = emitter.new(shape), emitter.new(shape)
    emitter.emit(
        RopeTable(
            tokens=positions.shape[0],
            pairs=dim // 2,
            scaled_pairs=(scaling.rotary_dim or dim) // 2,
            positions=positions,
            rates=rates,
            cos=cos,
            sin=sin,
            factor=scaling.gain,
        )
    )
    return cos, sin


def rope(
    emitter: CommandEmitter, q: Any, k: Any, cos: Any, sin: Any
) -> tuple[Any, Any]:
    cos, sin = (x if x.flags.c_contiguous else emitter.copied(x) for x in (cos, sin))
    return _rotated(emitter, q, cos, sin), _rotated(emitter, k, cos, sin)


def _rotated(emitter: CommandEmitter, x: Any, cos: Any, sin: Any) -> Any:
    x = emitter.dense(x)
    out = emitter.new(x.shape)
    rows, heads, width = x.shape
    emitter.emit(
        Rope(
            rows=rows,
            heads=heads,
            head_width=width,
            x_stride=stride(x),
            y_stride=stride(out),
            x=x,
            cos=cos,
            sin=sin,
            y=out,
        )
    )
    return out


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """The table, computed once per step, and the rotation in every layer."""
    for run in (rope_table, rope):
        yield Kernel(run.__name__, "native", partial(run, emitter), invariant=True)
