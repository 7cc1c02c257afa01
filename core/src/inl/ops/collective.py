"""Collective ops over ranks; on an axis of size 1 they are the identity.

The bodies are the single-rank case. A backend with
:class:`~inl.backend.base.Collectives` provides kernels that communicate. Their cost is
0: they use links, not device memory.
"""

from __future__ import annotations

from inl.spec.op import Case, Spec, op
from inl.spec.step import Array


@op(
    shapes=lambda x, *, axis: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=lambda rng: [Case("3x4", (rng.standard_normal((3, 4)),), {"axis": "tensor"})],
    traffic=lambda *_, **__: 0,
)
def all_reduce(x: Array, *, axis: str) -> Array:  # noqa: ARG001
    """Sum ``x`` over the ranks of ``axis``; the shape stays."""
    return x


@op(
    shapes=lambda x, *, axis: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=lambda rng: [Case("3x4", (rng.standard_normal((3, 4)),), {"axis": "tensor"})],
    traffic=lambda *_, **__: 0,
)
def all_gather(x: Array, *, axis: str) -> Array:  # noqa: ARG001
    """Concatenate the ranks' ``x`` along the last axis."""
    return x
