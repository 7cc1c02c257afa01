"""Embedding lookup, row gather and zero tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from inl.spec.op import Case, Spec, elements, nbytes, op, stored_nbytes
from inl.spec.step import Array


class Embedding(NamedTuple):
    """Parameters of :data:`embedding`."""

    weight: Array
    """[V, H]."""


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for tokens, vocab, hidden in ((1, 5, 3), (7, 33, 16)):
        ids = rng.integers(0, vocab, tokens).astype(np.int32)
        weight = Embedding(rng.standard_normal((vocab, hidden)))
        yield Case(f"{tokens}x{vocab}x{hidden}", (ids, weight))


def _embedding_traffic(out: Any, tokens: Any, w: Embedding) -> int:
    """One row per token, not the table."""
    row = stored_nbytes(w.weight) // w.weight.shape[0]
    return int(nbytes((tokens, out)) + elements(tokens) * row)


@op(
    shapes=lambda tokens, w: Spec((*tokens.shape, w.weight.shape[1]), w.weight.dtype),
    cases=_cases,
    weights=Embedding,
    traffic=_embedding_traffic,
)
def embedding(tokens: Array, w: Embedding) -> Array:
    """Look up the rows ``tokens`` [T] of ``w.weight`` [V, H]: [T, H]."""
    return w.weight[tokens]


def _row_cases(rng: np.random.Generator) -> Iterable[Case]:
    x = rng.standard_normal((9, 5))
    yield Case("repeated", (x, np.array([8, 0, 3, 3], np.int32)))
    yield Case("one", (x, np.array([2], np.int32)))


@op(
    shapes=lambda x, index: Spec((*index.shape, *x.shape[1:]), x.dtype),
    cases=_row_cases,
    traffic=lambda out, _x, index: nbytes(index) + 2 * nbytes(out),
)
def take_rows(x: Array, index: Array) -> Array:
    """Gather rows ``index`` [S] of ``x`` [T, ...]: [S, ...]."""
    return x[index]


@op(
    shapes=lambda x: Spec(x.shape, x.dtype),
    cases=lambda rng: [Case("3x4", (rng.standard_normal((3, 4)),))],
    traffic=lambda out, _x: nbytes(out),
)
def zeros_like(x: Array) -> Array:
    """Return zeros with the shape and dtype of ``x``."""
    return np.zeros_like(x)
