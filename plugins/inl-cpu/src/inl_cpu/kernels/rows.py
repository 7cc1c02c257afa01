"""Row gathers, activations, zeros, and collectives over a single rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inl.ops import catalog
from inl.ops.activation import KINDS, check_kind
from inl.spec.kernel import Kernel
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import Activate, TakeRows, Zero
from inl_cpu.kernels.fallback import run_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import CommandEmitter


def take_rows(emitter: CommandEmitter, x: Any, index: Any) -> Any:
    if x.dtype != "float32" or not x.size:
        return run_body(emitter, catalog()["take_rows"], x, index)
    x = emitter.dense(x)
    out = emitter.new((*index.shape, *x.shape[1:]))
    emitter.emit(
        TakeRows(
            rows=index.size,
            width=out.size // max(index.size, 1),
            x_stride=stride(x),
            x_rows=x.shape[0],
            x=x,
            index=index,
            y=out,
        )
    )
    return out


def zeros_like(emitter: CommandEmitter, x: Any) -> Any:
    out = emitter.new(x.shape, x.dtype)
    emitter.emit(Zero(count=out.nbytes // 4, y=out))
    return out


def activate(emitter: CommandEmitter, x: Any, *, kind: str) -> Any:
    check_kind(kind)
    x = x if x.flags.c_contiguous else emitter.copied(x)
    out = emitter.new(x.shape)
    emitter.emit(Activate(count=x.size, kind=KINDS.index(kind), x=x, y=out))
    return out


def identity(x: Any, *, axis: str) -> Any:  # noqa: ARG001
    """A collective over one rank returns its input."""
    return x


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Row copies, activations, and collectives over a single rank."""
    for run in (activate, take_rows, zeros_like):
        yield Kernel(run.__name__, "native", partial(run, emitter), invariant=True)
    for name in ("all_reduce", "all_gather"):
        yield Kernel(name, "native", identity, invariant=True)
