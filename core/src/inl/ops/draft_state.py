"""Recurrent state of rows that verify drafts: what it is computed from, and again.

State of every token cannot go back to before a rejected one. A program computes it for
all tokens of a row from a copy, and for the accepted ones from what it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from inl.ops.attention import random_step
from inl.ops.verify import ROWS, verify_step
from inl.spec.op import Case, Spec, op
from inl.spec.step import NO_TOKEN, Array, Step

USED_BY: Final = "drafts of models with recurrent layers"


def _copy_cases(rng: np.random.Generator) -> Iterable[Case]:
    yield Case("rows", (verify_step(rng)[0],))
    yield Case("padded", (verify_step(rng, pads=(3, 2))[0],))
    yield Case("decode", (random_step(rng, [5, 2, 9], [1, 1, 1], pad_rows=2)[0],))


def _copy_shapes(step: Any) -> tuple[Spec, Step]:
    rows = step.slots.shape[0]
    changed: Step = step._replace(slots=Spec((rows,), "int32"), plan=())
    return Spec((rows + 1,), "int32"), changed


@op(shapes=_copy_shapes, cases=_copy_cases, rounds=False, since=(2, 1), used_by=USED_BY)
def own_slots(step: Step) -> tuple[Array, Step]:
    """Return the slots of a copy of the rows' state, and a step on that copy.

    The slots are int32 [R + 1]: slot 0, then that of each row. In the step, row r has
    slot r + 1, and padding rows slot 0.
    """
    rows = step.slots.shape[0]
    number = np.arange(1, rows + 1, dtype=np.int32)
    own = np.where(number <= step.used_counts[1], number, 0).astype(np.int32)
    index = np.concatenate([np.zeros(1, np.int32), step.slots]).astype(np.int32)
    return index, step._replace(slots=own, plan=())


def _accepted_cases(rng: np.random.Generator) -> Iterable[Case]:
    width = max(count for _, count in ROWS)
    for name, pads in (("rows", (0, 0)), ("padded", (3, 2))):
        step, _ = verify_step(rng, pads=pads)
        counts = step.starts[1:] - step.starts[:-1]
        for part in ("all", "some"):
            least = np.minimum(counts, 1)
            kept = counts if part == "all" else rng.integers(least, counts + 1)
            tokens = rng.integers(0, 11, (len(counts), width))
            tokens[np.arange(width) >= kept[:, None]] = NO_TOKEN
            args = tokens.astype(np.int32).reshape(-1), step
            yield Case(f"{name}/{part}", args, {"width": width})


def _accepted_shapes(_kept: Any, step: Any, *, width: int) -> tuple[Spec, Step]:
    assert width > 1
    count = Spec(step.tokens.shape, "int32")
    changed: Step = step._replace(
        tokens=count, positions=count, rows=count,
        starts=Spec(step.starts.shape, "int32"), used_counts=Spec((3,), "int32"),
        plan=(),
    )  # fmt: skip
    return count, changed


@op(
    shapes=_accepted_shapes,
    cases=_accepted_cases,
    rounds=False,
    since=(2, 1),
    used_by=USED_BY,
)
def accepted_rows(kept: Array, step: Step, *, width: int) -> tuple[Array, Step]:
    """Return the accepted tokens of a step, and the step that has these alone.

    kept: int32 [R * width], the result of :data:`~inl.ops.verify.verify`. A row has as
    many tokens as samples that are not :data:`~inl.spec.step.NO_TOKEN`, the first ones.
    Returns their indices int32 [T] in the order of rows, and a step of them: its
    ``tokens``, ``positions``, ``rows``, ``starts`` and numbers of tokens. Indices after
    the last one are 0, and tokens there padding. Other fields stay.
    """
    rows, total = step.slots.shape[0], step.tokens.shape[0]
    counts = (kept.reshape(rows, width) != NO_TOKEN).sum(1)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    number = np.arange(total)
    row = (number[:, None] >= starts[1:]).sum(1).clip(max=rows - 1)
    index = np.where(number < starts[-1], step.starts[row] + number - starts[row], 0)
    used = np.stack([step.used_counts[0], step.used_counts[1], starts[-1]])
    return index.astype(np.int32), step._replace(
        tokens=step.tokens[index],
        positions=step.positions[index],
        rows=row.astype(np.int32),
        starts=starts,
        used_counts=used.astype(np.int32),
        plan=(),
    )
