"""Normalization: root-mean-square, alone and after an addition, and of layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inl.ops.norm import LayerNorm as LayerNormWeights
from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import AddNorm, LayerNorm, RmsNorm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import CommandEmitter


def rms_norm(emitter: CommandEmitter, x: Any, w: Norm, *, eps: float) -> Any:
    """Normalize over the last axis of ``x`` [T, H] or [T, heads, d]."""
    x = emitter.dense(x)
    out = emitter.new(x.shape)
    if not out.size:
        return out
    width = x.shape[-1]
    emitter.emit(
        RmsNorm(
            rows=1 if x.ndim < 2 else x.shape[0],
            heads=1 if x.ndim < 2 else out[0].size // width,
            head_width=width,
            x_stride=stride(x),
            y_stride=stride(out),
            x=x,
            weight=w.weight,
            y=out,
            eps=eps,
        )
    )
    return out


def reduce_add_norm(
    emitter: CommandEmitter, residual: Any, delta: Any, w: Norm, *, eps: float
) -> tuple[Any, Any]:
    """Add and normalize; with a single rank there is nothing to reduce."""
    residual, delta = (
        x if x.flags.c_contiguous else emitter.copied(x) for x in (residual, delta)
    )
    total, out = emitter.new(residual.shape), emitter.new(residual.shape)
    rows, width = residual.shape
    emitter.emit(
        AddNorm(
            rows=rows,
            width=width,
            residual=residual,
            delta=delta,
            weight=w.weight,
            sum=total,
            y=out,
            eps=eps,
        )
    )
    return total, out


def layer_norm(
    emitter: CommandEmitter, x: Any, w: LayerNormWeights, *, eps: float
) -> Any:
    """Normalize over the last axis of ``x``."""
    x = x if x.flags.c_contiguous else emitter.copied(x)
    out = emitter.new(x.shape)
    if not out.size:
        return out
    width = x.shape[-1]
    emitter.emit(
        LayerNorm(
            rows=x.size // width,
            width=width,
            x=x,
            weight=w.weight,
            bias=w.bias,
            y=out,
            eps=eps,
        )
    )
    return out


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """All norms, batch-invariant."""
    for run in (rms_norm, reduce_add_norm, layer_norm):
        yield Kernel(run.__name__, "native", partial(run, emitter), invariant=True)
