"""Products of each head with a matrix of its own, and joined heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Sizes, Spec, elements, op
from inl.spec.step import Array

SIZES = ((1, 2, 4, 6), (7, 3, 16, 40))
"""(tokens, heads, N, K) of the cases of :data:`head_linear`."""


class HeadLinear(NamedTuple):
    """Parameters of :data:`head_linear`."""

    weight: Array
    """[heads * N, K]: the matrices [N, K] of all heads."""


def _cases(rng: np.random.Generator, sizes: Sizes = SIZES) -> Iterable[Case]:
    for tokens, heads, n, k in sizes:
        w = HeadLinear(rng.standard_normal((heads * n, k)))
        for transposed in (False, True):
            x = rng.standard_normal((tokens, heads, n if transposed else k))
            name = f"{tokens}x{heads}x{n}x{k}" + "/transposed" * transposed
            yield Case(name, (x, w), {"transposed": transposed})


def _shapes(x: Spec, w: Any, *, transposed: bool) -> Spec:
    tokens, heads, _ = x.shape
    rows, columns = w.weight.shape
    return Spec((tokens, heads, columns if transposed else rows // heads), x.dtype)


@op(
    shapes=_shapes,
    cases=_cases,
    weights=HeadLinear,
    flops=lambda x, w, **_: 2 * x.shape[0] * elements(w.weight),
    since=(1, 2),
)
def head_linear(x: Array, w: HeadLinear, *, transposed: bool) -> Array:
    """Multiply each head of ``x`` with a matrix [N, K] of its own.

    x: [T, heads, K], returns ``x @ matrix.T``, [T, heads, N]; or if ``transposed`` x:
    [T, heads, N], returns ``x @ matrix``, [T, heads, K]. Accumulates in float32 or
    wider.
    """
    heads = x.shape[1]
    matrices = w.weight.reshape(heads, -1, w.weight.shape[-1])
    if not transposed:
        matrices = matrices.swapaxes(1, 2)
    return (x.swapaxes(0, 1) @ matrices).swapaxes(0, 1)


def _join_cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, heads, left, right in ((1, 1, 3, 2), (5, 4, 16, 8)):
        a = rng.standard_normal((tokens, heads, left))
        b = rng.standard_normal((tokens, heads, right))
        yield Case(f"{tokens}x{heads}x{left}+{right}", (a, b))


@op(
    shapes=lambda a, b: Spec((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.dtype),
    cases=_join_cases,
    since=(1, 2),
)
def join_lanes(a: Array, b: Array) -> Array:
    """Concatenate ``a`` [T, heads, N] and ``b`` [T, heads, M]: [T, heads, N + M]."""
    return np.concatenate([a, b], axis=-1)
