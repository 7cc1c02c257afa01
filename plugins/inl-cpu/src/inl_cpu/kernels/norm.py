"""Root-mean-square normalization, and with the sum before it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inl.ops.norm import Norm
from inl.spec.kernel import Kernel
from inl_cpu.abi import Opcode
from inl_cpu.command_emitter import stride

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import Stage


def rms_norm(stage: Stage, x: Any, w: Norm, *, eps: float) -> Any:
    """Over the last axis of ``x`` [T, H] or [T, heads, d]."""
    x = stage.dense(x)
    out = stage.new(x.shape)
    width = x.shape[-1]
    heads = 1 if x.ndim < 2 else out[0].size // width
    rows = 1 if x.ndim < 2 else x.shape[0]
    dims = [rows, heads, width, stride(x), stride(out)]
    if out.size:
        stage.emit(Opcode.RMS_NORM, dims, [x, w.weight, out], [eps])
    return out


def reduce_add_norm(
    stage: Stage, residual: Any, delta: Any, w: Norm, *, eps: float
) -> tuple[Any, Any]:
    """One rank has the whole sum already."""
    residual, delta = (
        x if x.flags.c_contiguous else stage.copied(x) for x in (residual, delta)
    )
    total, out = stage.new(residual.shape), stage.new(residual.shape)
    data = [residual, delta, w.weight, total, out]
    stage.emit(Opcode.ADD_NORM, [*residual.shape], data, [eps])
    return total, out


def kernels(stage: Stage) -> Iterable[Kernel]:
    """Both, of equal bits whatever else is in the batch."""
    for run in (rms_norm, reduce_add_norm):
        yield Kernel(run.__name__, "native", partial(run, stage), invariant=True)
