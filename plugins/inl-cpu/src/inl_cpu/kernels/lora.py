"""Adapters of linear layers: each row reads the matrices of its own adapter only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inl.spec.kernel import Kernel
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import Lora

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl_cpu.command_emitter import CommandEmitter


def lora(
    emitter: CommandEmitter, y: Any, x: Any, w: Any, selected: Any, *, rank: int
) -> Any:
    base, x = emitter.dense(y), emitter.dense(x)
    out = emitter.new(y.shape)
    emitter.emit(
        Lora(
            rows=y.shape[0],
            width=y.shape[1],
            inner=x.shape[1],
            columns=selected.shape[1],
            rank=rank,
            x_stride=stride(x),
            base_stride=stride(base),
            base=base,
            x=x,
            a=w.a,
            b=w.b,
            selected=selected,
            y=out,
        )
    )
    return out


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """The grouped kernel."""
    yield Kernel("lora", "native", partial(lora, emitter), invariant=True)
