"""Rows of a tensor, zeros, and what one rank need not do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl_cpu.abi import Opcode
from inl_cpu.command_emitter import stride
from inl_cpu.kernels.fallback import run_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import Stage


def take_rows(stage: Stage, x: Any, index: Any) -> Any:
    if x.dtype != "float32" or not x.size:
        return run_body(stage, catalog()["take_rows"], x, index)
    x = stage.dense(x)
    out = stage.new((*index.shape, *x.shape[1:]))
    width = out.size // max(index.size, 1)
    dims = [index.size, width, stride(x), x.shape[0]]
    stage.emit(Opcode.TAKE_ROWS, dims, [x, index, out])
    return out


def zeros_like(stage: Stage, x: Any) -> Any:
    out = stage.new(x.shape, x.dtype)
    words = out.nbytes // 4
    stage.emit(Opcode.ZERO, [words], [out])
    return out


def alone(x: Any, *, axis: str) -> Any:  # noqa: ARG001
    """What one rank has is all there is."""
    return x


def kernels(stage: Stage) -> Iterable[Kernel]:
    """Copies of rows, and collectives over one rank."""
    for run in (take_rows, zeros_like):
        yield Kernel(run.__name__, "native", partial(run, stage), invariant=True)
    for name in ("all_reduce", "all_gather"):
        yield Kernel(name, "native", alone, invariant=True)
