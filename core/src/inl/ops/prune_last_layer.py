"""The step of the last layer: what is not cached for later is computed for few."""

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
    found: Step = step._replace(
        tokens=one, positions=one, rows=one, starts=Spec((rows + 1,), "int32"),
        writes=Spec((groups, rows), "int32"), samples=one, used_counts=Spec((3,), "int32"),
        plan=(),
    )  # fmt: skip
    return found


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, cached, counts, pads in SHAPES:
        yield Case(name, (random_step(rng, cached, counts, **pads)[0],))


@op(shapes=_shapes, cases=_cases, rounds=False)
def prune_last_layer(step: Step) -> Step:
    """The step of each row's last token alone, whose key and value are cached.

    Of a step that samples one token of each row. The result has a token for each row,
    in their order, so T and S are R; what belongs to the rows stays. Tokens of padding
    rows are anything that is there, and belong to no row.
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
