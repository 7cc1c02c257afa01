"""Pooling: one row for each sequence of a batch, and rows of length 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from inl.errors import RequestError
from inl.ops.full_attention import starts_of
from inl.spec.op import Case, Spec, elements, op
from inl.spec.step import Array

POOLINGS: Final = ("mean", "first", "last")
"""Accepted values of the ``kind`` attribute."""


def check_pooling(kind: str) -> None:
    """Raise :class:`RequestError` for an unknown kind."""
    if kind not in POOLINGS:
        raise RequestError(
            f"pool: kind: found {kind!r:.80}, accepted: {', '.join(POOLINGS)}"
        )


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, lengths, padding in (
        ("one", (1,), 0),
        ("several", (5, 1, 130), 0),
        ("padded", (3, 6, 0, 0), 4),
    ):
        x = 3 * rng.standard_normal((sum(lengths) + padding, 24))
        for kind in POOLINGS:
            yield Case(f"{kind}/{name}", (x, starts_of(lengths)), {"kind": kind})


def _shapes(x: Spec, starts: Spec, *, kind: str) -> Spec:
    check_pooling(kind)
    return Spec((starts.shape[0] - 1, *x.shape[1:]), x.dtype)


@op(shapes=_shapes, cases=_cases, flops=lambda x, *_, **__: elements(x),
    since=(2, 0),
    used_by="encoders")  # fmt: skip
def pool(x: Array, starts: Array, *, kind: str) -> Array:
    """Pool the tokens of each sequence of ``x`` [T, H]: [N, H].

    starts: int32 [N + 1], see :data:`~inl.ops.full_attention.full_attention`. kind:
    "mean" of the tokens, in float32 or wider; or the "first" or "last" token. A
    sequence without tokens gives zeros. Raises
    :class:`~inl.errors.RequestError` for another kind.
    """
    check_pooling(kind)
    first, end = starts[:-1], starts[1:]
    used = (end > first)[:, None]
    if kind != "mean":
        at = first if kind == "first" else end - 1
        return np.where(used, x[np.clip(at, 0, len(x) - 1)], 0).astype(x.dtype)
    rows = [x[a:b].sum(0) for a, b in zip(first, end, strict=True)]
    return np.stack(rows) / np.maximum(end - first, 1).astype(x.dtype)[:, None]


def _unit_cases(rng: np.random.Generator) -> Iterable[Case]:
    for rows, width in ((1, 2), (5, 577)):
        for scale in (1e-3, 100.0):
            x = scale * rng.standard_normal((rows, width))
            yield Case(f"{rows}x{width}/{scale:g}", (x,))
    yield Case("zeros", (np.zeros((2, 8)),))


@op(
    shapes=lambda x: Spec(x.shape, x.dtype),
    cases=_unit_cases,
    flops=lambda x: 3 * elements(x),
    since=(2, 0),
    used_by="encoders",
)
def unit_rows(x: Array) -> Array:
    """Scale each row of ``x`` [N, H] to length 1, in float32; a row of zeros stays."""
    length: Any = np.sqrt(np.square(x).sum(-1, keepdims=True))
    return x / np.maximum(length, 1e-12)
