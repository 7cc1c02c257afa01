"""Sums and concatenations over ranks; the identity on an axis of size 1.

The bodies are what one rank alone computes. A backend with
:class:`~inl.backend.base.Collectives` brings kernels that talk to the others.
"""

from __future__ import annotations

from inl.spec.op import Case, Spec, op
from inl.spec.step import Array


@op(
    shapes=lambda x, *, axis: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=lambda rng: [Case("3x4", (rng.standard_normal((3, 4)),), {"axis": "tensor"})],
)
def all_reduce(x: Array, *, axis: str) -> Array:  # noqa: ARG001
    """Sum ``x`` over the ranks of ``axis``."""
    return x


@op(
    shapes=lambda x, *, axis: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=lambda rng: [Case("3x4", (rng.standard_normal((3, 4)),), {"axis": "tensor"})],
)
def all_gather(x: Array, *, axis: str) -> Array:  # noqa: ARG001
    """Concatenate the ranks' parts along the last axis."""
    return x
