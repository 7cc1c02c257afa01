"""Recurrent layers: convolutions, the gated delta rule and the scan of Mamba-2.

State of slots is updated in place. A text has the same bits however it is divided into
steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import widen
from inl.ops.recurrent import LENGTH_EPS, Decay, Taps
from inl.ops.ssm import Ssm
from inl.spec.kernel import HostGroup, Kernel
from inl.spec.weights import in_layout
from inl.weights.packing import present
from inl_cpu.command_emitter import stride
from inl_cpu.instructions import CausalConv, DeltaRule, SsmScan
from inl_cpu.memory import empty

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inl.spec.op import Spec
    from inl.spec.step import Step
    from inl_cpu.command_emitter import CommandEmitter

BY_TAPS = "by_taps"
"""Layout of :class:`TapRows`."""


TapRows = in_layout(BY_TAPS)(Taps)
"""The factors [K, C]: adjacent channels, those of the newest token last."""


def causal_conv(
    emitter: CommandEmitter, x: Any, table: Any, step: Step, w: Taps
) -> tuple[Any, Any]:
    x = emitter.dense(x)
    out = emitter.new(x.shape)
    emitter.emit(
        CausalConv(
            tokens=x.shape[0],
            rows=step.slots.shape[0],
            slots=table.shape[0],
            channels=x.shape[1],
            taps=w.weight.shape[0],
            x_stride=stride(x),
            x=x,
            weight=w.weight,
            table=table,
            y=out,
            **_spans(step),
        )
    )
    return out, table


def delta_rule(
    emitter: CommandEmitter, q: Any, k: Any, v: Any, a: Any, b: Any, table: Any,
    step: Step, w: Decay, *, tiled: bool,
) -> tuple[Any, Any]:  # fmt: skip
    q, k, v = map(emitter.dense, (q, k, v))
    if stride(q) != stride(k):
        q, k = emitter.copied(q), emitter.copied(k)
    a, b = (x if x.flags.c_contiguous else emitter.copied(x) for x in (a, b))
    out = emitter.new(v.shape)
    emitter.emit(
        DeltaRule(
            tokens=v.shape[0],
            rows=step.slots.shape[0],
            slots=table.shape[0],
            key_heads=q.shape[1],
            heads=v.shape[1],
            key_width=q.shape[2],
            width=v.shape[2],
            key_stride=stride(q),
            v_stride=stride(v),
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            rate=w.rate,
            shift=w.shift,
            table=table,
            y=out,
            tiled=int(tiled),
            eps=LENGTH_EPS,
            **_spans(step),
        )
    )
    return out, table


def ssm_scan(
    emitter: CommandEmitter, x: Any, b: Any, c: Any, dt: Any, table: Any, step: Step,
    w: Ssm,
) -> tuple[Any, Any]:  # fmt: skip
    x, b, c, dt = map(emitter.dense, (x, b, c, dt))
    if stride(b) != stride(c):
        b, c = emitter.copied(b), emitter.copied(c)
    out = emitter.new(x.shape)
    emitter.emit(
        SsmScan(
            tokens=x.shape[0],
            rows=step.slots.shape[0],
            slots=table.shape[0],
            groups=b.shape[1],
            heads=x.shape[1],
            key_width=b.shape[2],
            width=x.shape[2],
            x_stride=stride(x),
            key_stride=stride(b),
            dt_stride=stride(dt),
            x=x,
            b=b,
            c=c,
            dt=dt,
            rate=w.rate,
            shift=w.shift,
            skip=w.skip,
            table=table,
            y=out,
            **_spans(step),
        )
    )
    return out, table


def _spans(step: Step) -> dict[str, Any]:
    """Return the operands that divide tokens into rows."""
    return {
        "positions": step.positions,
        "starts": step.starts,
        "row_slots": step.slots,
        "used_counts": step.used_counts,
    }


def can_pack(weight: Spec) -> str | None:
    """Refuse a convolution that keeps no inputs."""
    if len(weight.shape) == 3 and weight.shape[-1] > 1:
        return None
    return f"a convolution of shape {list(weight.shape)}, takes 2 taps or more"


def pack_taps(group: HostGroup, _backend: Any, _dtype: str) -> Taps:
    taps = widen(present(group["weight"]))[:, 0].T
    out = empty(taps.shape)
    np.copyto(out, taps, casting="same_kind")
    return TapRows(out)


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """The recurrences, batch-invariant."""
    yield Kernel(
        "causal_conv",
        "native",
        partial(causal_conv, emitter),
        layout=BY_TAPS,
        can_pack=can_pack,
        pack=pack_taps,
        invariant=True,
    )
    rule = partial(delta_rule, emitter)
    yield Kernel("delta_rule", "native", rule, invariant=True)
    scan = partial(ssm_scan, emitter)
    yield Kernel("ssm_scan", "native", scan, invariant=True)
