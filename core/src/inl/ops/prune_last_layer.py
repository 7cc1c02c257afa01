"""Pruned step of the last layer: only the sampled tokens are computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from inl.ops.attention import SHAPES, random_step
from inl.spec.op import Case, Spec, op
from inl.spec.step import Step


def _shapes(step: Any) -> Step:
    (rows,), groups = step.lengths.shape, step.writes.shape[0]
    one = Spec((rows,), "int32")
    pruned: Step = step._replace(
        tokens=one, positions=one, rows=one, starts=Spec((rows + 1,), "int32"),
        writes=Spec((groups, rows), "int32"), samples=one,
        used_counts=Spec((3,), "int32"), plan=(),
    )  # fmt: skip
    return pruned


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, cached, counts, pads in SHAPES:
        yield Case(name, (random_step(rng, cached, counts, **pads)[0],))


@op(shapes=_shapes, cases=_cases, rounds=False)
def prune_last_layer(step: Step) -> Step:
    """Reduce a step to the last token of each row.

    The step must sample one token per row, and keys and values of all its tokens must
    be cached. The result has one token per row, in row order: T and S are R. Fields per
    row stay. Tokens of padding rows are arbitrary and belong to no row.
    """
    at, rows = step.samples, step.lengths.shape[0]
    used = step.used_counts[1]
    return step._replace(
        tokens=step.tokens[at],
        positions=step.positions[at],
        rows=step.rows[at],
        starts=np.minimum(np.arange(rows + 1), used).astype(np.int32),
        writes=step.writes[:, at],
        samples=np.arange(rows, dtype=np.int32),
        used_counts=np.full(3, used, np.int32),
        plan=(),
    )
