"""Rows of a table, and rows of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from inl.spec.kernel import PLAIN
from inl.spec.op import Case, Spec, op
from inl.spec.step import Array


class Embedding(NamedTuple):
    """Parameters of :data:`embedding`."""

    weight: Array
    """[V, H]."""

    @property
    def layout(self) -> str:
        """Unpacked."""
        return PLAIN


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, vocab, hidden in ((1, 5, 3), (7, 33, 16)):
        ids = rng.integers(0, vocab, tokens).astype(np.int32)
        weight = Embedding(rng.standard_normal((vocab, hidden)))
        yield Case(f"{tokens}x{vocab}x{hidden}", (ids, weight))


@op(
    shapes=lambda tokens, w: Spec((*tokens.shape, w.weight.shape[1]), w.weight.dtype),
    cases=_cases,
    weights=Embedding,
)
def embedding(tokens: Array, w: Embedding) -> Array:
    """Look ``tokens`` [T] up in ``w.weight`` [V, H]: [T, H]."""
    return w.weight[tokens]


def _row_cases(rng: np.random.Generator) -> Iterable[Case]:
    x = rng.standard_normal((9, 5))
    yield Case("repeated", (x, np.array([8, 0, 3, 3], np.int32)))
    yield Case("one", (x, np.array([2], np.int32)))


@op(
    shapes=lambda x, index: Spec((*index.shape, *x.shape[1:]), x.dtype),
    cases=_row_cases,
)
def take_rows(x: Array, index: Array) -> Array:
    """Rows ``index`` [S] of ``x`` [T, ...]: [S, ...]."""
    return x[index]


@op(
    shapes=lambda x: Spec(x.shape, x.dtype),
    cases=lambda rng: [Case("3x4", (rng.standard_normal((3, 4)),))],
)
def zeros_like(x: Array) -> Array:
    """Zeros of the shape and dtype of ``x``."""
    return np.zeros_like(x)
