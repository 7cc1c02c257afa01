"""Calls of ops in a model; every ``type: ignore`` marks one that mypy must refuse."""

from __future__ import annotations

from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import Norm
from inl.ops.protocol import Ops
from inl.spec.step import Array, Step
from inl.spec.weights import Group


def accepted(ops: Ops, x: Array, step: Step, w: QkvLinear | Group) -> Array:
    """Tensors are positional, attributes are keywords, results have their count."""
    q, k, v = ops.qkv_linear(x, w)
    q, k = ops.rope(q, k, x, x)
    rows: int = ops.bucket.rows * ops.block_size
    step = step._replace(plan=ops.plan(step, block_size=rows))
    return ops.take_rows(q + k + v, step.samples)


def refused(ops: Ops, x: Array, norm: Norm, w: Linear, none: Norm | None) -> None:
    """One mistake a line."""
    ops.rms_nrom(x, norm, eps=1e-5)  # type: ignore[attr-defined]
    ops.rms_norm(x, norm)  # type: ignore[call-arg]
    ops.rms_norm(x, norm, epsilon=1e-5)  # type: ignore[call-arg]
    ops.rms_norm(x, norm, eps="small")  # type: ignore[arg-type]
    ops.rms_norm(x, w, eps=1e-5)  # type: ignore[arg-type]
    ops.rms_norm(x, none, eps=1e-5)  # type: ignore[arg-type]
    ops.linear(x, w, w)  # type: ignore[call-arg]
    ops.linear(x, w=w)  # type: ignore[call-arg]
    q, k, v = ops.rope(x, x, x, x)  # type: ignore[misc]
    ops.bucket = q, k, v  # type: ignore[misc, assignment]
