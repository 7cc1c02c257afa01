"""Linear layers; ``weight`` is [out, in], as in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Sizes, Spec, elements, op
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

SIZES = ((1, 8, 16), (2, 5, 3), (13, 64, 48), (33, 96, 160))
"""(tokens, outputs, inputs) of the cases."""


class Linear(NamedTuple):
    """Parameters of :data:`linear`."""

    weight: Array
    """[N, K]."""
    bias: Array | None = None
    """[N]."""


class QkvLinear(NamedTuple):
    """Parameters of :data:`qkv_linear`; a kernel may pack them as one matrix."""

    q: Array
    """[heads * head_dim, K]."""
    k: Array
    """[kv_heads * head_dim, K]."""
    v: Array
    """[kv_heads * head_dim, K]."""
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None


def product_flops(x: Any, w: Any, **_: Any) -> int:
    """Twice the multiply-adds of ``x`` with every matrix of the group ``w``."""
    rows = int(math.prod(x.shape[:-1]))
    matrices = [m for m in w if m is not None and len(m.shape) == 2]
    return 2 * rows * sum(elements(m) for m in matrices)


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, n, k in sizes:
        x, weight = rng.standard_normal((tokens, k)), rng.standard_normal((n, k))
        yield Case(f"{tokens}x{n}x{k}", (x, Linear(weight)))
        biased = Linear(weight, rng.standard_normal(n))
        yield Case(f"{tokens}x{n}x{k}/bias", (x, biased))


@op(
    shapes=lambda x, w: Spec((*x.shape[:-1], w.weight.shape[0]), x.dtype),
    cases=_cases,
    weights=Linear,
    flops=product_flops,
)
def linear(x: Array, w: Linear) -> Array:
    """Linear layer: ``x @ w.weight.T + w.bias``.

    x: [T, K]. w.weight: [N, K]. w.bias: [N] or ``None``. Returns [T, N]. Accumulates
    in float32 or wider.
    """
    y = x @ w.weight.T
    return y if w.bias is None else y + w.bias


def _qkv_cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, n, k in sizes:
        x = rng.standard_normal((tokens, k))
        parts = [rng.standard_normal((size, k)) for size in (3 * n, n, n)]
        yield Case(f"{tokens}x{n}x{k}", (x, QkvLinear(*parts)))
        biases = [rng.standard_normal(size) for size in (3 * n, n, n)]
        yield Case(f"{tokens}x{n}x{k}/bias", (x, QkvLinear(*parts, *biases)))


@op(cases=_qkv_cases, weights=QkvLinear, flops=product_flops)
def qkv_linear(ops: Ops, x: Array, w: QkvLinear) -> tuple[Array, Array, Array]:
    """Project ``x`` [T, K] to queries, keys and values: three of [T, N]."""
    return (
        ops.linear(x, Linear(w.q, w.q_bias)),
        ops.linear(x, Linear(w.k, w.k_bias)),
        ops.linear(x, Linear(w.v, w.v_bias)),
    )


def _cap_cases(rng: np.random.Generator) -> Iterable[Case]:
    for rows, width in ((1, 5), (4, 257)):
        x = 40 * rng.standard_normal((rows, width))
        yield Case(f"{rows}x{width}", (x,), {"cap": 30.0})
    edge = np.array([[-1e4, -1e-3, 0.0, 1e-3, 1e4]])
    yield Case("edges", (edge,), {"cap": 2.5})


@op(
    shapes=lambda x, *, cap: Spec(x.shape, x.dtype),  # noqa: ARG005
    cases=_cap_cases,
    flops=lambda x, **_: 3 * elements(x),
)
def soft_cap(x: Array, *, cap: float) -> Array:
    """Soft limit ``cap * tanh(x / cap)``, elementwise, in float32."""
    return cap * np.tanh(x / cap)
