"""Ops that a backend may leave out: newer than its contract, or of few programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from inl.plugin.check import dotted
from inl.spec.dispatch import Tracer
from inl.spec.op import OpSpec
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.spec.strict_array import StrictArray
from inl.spec.tree import tree_map

if TYPE_CHECKING:
    from typing import Any

    from inl.testing.target import Target


def left_out(target: Target) -> dict[str, str]:
    """Return the ops that a backend may leave out, and does, with the reason.

    Composites that call such an op are among them. A model that needs one is refused
    by its name.
    """
    own = {kernel.op for kernel in target.selection.kernels}
    absent = {
        name: reason
        for name, op in target.ops.items()
        if name not in own and not op.composite and (reason := _optional(op, target))
    }
    for name, op in target.ops.items():
        missing = called_ops(op) & absent.keys() if name not in own else ()
        if missing:
            absent[name] = absent[min(missing)]
    return absent


def _optional(op: OpSpec, target: Target) -> str:
    if op.since > target.contract:
        return f"since contract {dotted(op.since)}"
    return f"used by {op.used_by}" if op.used_by else ""


def called_ops(op: OpSpec) -> frozenset[str]:
    """Return the ops that the body of a composite calls, directly or not."""
    case = next(iter(op.cases(np.random.default_rng(0))), None)
    if not op.composite or case is None:
        return frozenset()
    specs = tree_map(lambda x: StrictArray(np.shape(x), _dtype(x)), case.args)
    tracer = Tracer(KernelSelection(()), Bucket(tokens=1, rows=1), 1)
    try:
        op.body(tracer, *specs, **case.attrs)
    # The checks of a third-party op report that its body raises.
    except Exception:
        return frozenset()
    return frozenset(tracer.choices)


def _dtype(x: Any) -> str:
    return str(np.asarray(x).dtype.name)
