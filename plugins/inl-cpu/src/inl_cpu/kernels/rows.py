"""Row gathers, activations, zeros, and collectives over a single rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.ops.activation import KINDS, check_kind
from inl.spec.kernel import Kernel
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import Activate, TakeRows, Zero

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import CommandEmitter


COMPUTED: Final = ("bfloat16", "float32")
"""Dtypes to compute in: both have arrays of float32."""


def refuse_rows(x: Any, index: Any) -> str | None:  # noqa: ARG001
    if str(x.dtype) not in COMPUTED or 0 in x.shape:
        return f"takes rows of {', '.join(COMPUTED)}, found {x.dtype} {list(x.shape)}"
    return None


def take_rows(emitter: CommandEmitter, x: Any, index: Any) -> Any:
    assert x.dtype == np.float32, "no other dtype is computed in"
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
    for run in (activate, zeros_like):
        yield Kernel(run.__name__, "native", partial(run, emitter), invariant=True)
    rows = partial(take_rows, emitter)
    yield Kernel("take_rows", "native", rows, refuse=refuse_rows, invariant=True)
    for name in ("all_reduce", "all_gather"):
        yield Kernel(name, "native", identity, invariant=True)
