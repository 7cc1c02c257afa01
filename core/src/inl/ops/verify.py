"""Verification of drafted tokens: each row keeps tokens up to the first difference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from inl.ops.step import empty_tables, make_step
from inl.spec.message import DRAFT, FEEDBACK, Row, step_frame
from inl.spec.op import Case, Spec, nbytes, op
from inl.spec.step import NO_TOKEN, Array, Bucket, Step, Tables

ROWS = ((1, 3), (3, 1), (4, 4), (2, 2))
"""Slot and number of tokens of the rows of a case; the largest number is the width."""


def verify_step(
    rng: np.random.Generator,
    *,
    pads: tuple[int, int] = (0, 0),
    vocab: int = 11,
    rows: Sequence[tuple[int, int]] = ROWS,
    slots: int = 6,
) -> tuple[Step, Tables]:
    """Return a step that verifies drafts, and the tables after it."""
    width = max(count for _, count in rows)
    blocks = -(-(17 + width) // 4)
    tables = empty_tables(groups=1, slots=slots, max_blocks_per_seq=blocks, vocab=vocab)
    count = slots - 1
    scattered = rng.permutation(np.arange(1, 1 + count * blocks))
    tables.blocks[0, 1:] = scattered.reshape(count, blocks)
    tables.lengths[1:] = rng.integers(1, 18, count)
    tables.last[1:] = rng.integers(0, 11, count)
    tables.params[1:, 0] = np.resize([0.0, 0.7, 0.0, 1.3, 0.0], count)
    tables.params[1:, [2, 4]] = 1
    tables.params[1:, 5] = np.resize([0.0, 0.5, 0.0, -0.5, 0.0], count)
    if vocab:
        tables.token_counts[1:] = rng.integers(0, 4, (count, vocab))
    parts = [
        Row(
            slot,
            [*FEEDBACK, *(DRAFT,) * (count - 1)],
            [float(x) for x in rng.random(2 * width - 1)],
            [int(x) for x in rng.integers(0, 11, 2 * width - 2)],
        )
        for slot, count in rows
    ]
    used = sum(count for _, count in rows)
    bucket = Bucket(
        tokens=used + pads[0], rows=len(rows) + pads[1], tokens_per_row=width
    )
    message = step_frame(
        bucket, parts, step=1, groups=1, block_size=4, decode_rows=len(rows)
    )
    step, tables = make_step.body(message, tables, bucket=bucket, block_size=4)
    return step, tables


def _expand_shapes(step: Any, tables: Any) -> tuple[Step, Tables]:
    count, width = step.tokens.shape[0], tables.blocks.shape[2]
    one = Spec((count,), "int32")
    expanded: Step = step._replace(
        starts=Spec((count + 1,), "int32"), slots=one, samples=one,
        used_counts=Spec((3,), "int32"),
    )  # fmt: skip
    shapes = Tables(
        blocks=Spec((1, count, width), "int32"), lengths=one, last=one, adapters=one,
        **{
            name: Spec((count, *table.shape[1:]), str(table.dtype))
            for name in ("params", "token_counts", "bias")
            for table in [getattr(tables, name)]
        },
    )  # fmt: skip
    return expanded, shapes


def _expand_cases(rng: np.random.Generator) -> Iterable[Case]:
    yield Case("rows", verify_step(rng))
    yield Case("padded", verify_step(rng, pads=(3, 2)))
    yield Case("uncounted", verify_step(rng, vocab=0))


@op(shapes=_expand_shapes, cases=_expand_cases, rounds=False, since=(1, 2))
def expand_rows(step: Step, tables: Tables) -> tuple[Step, Tables]:
    """Return arguments for ``sample`` with one row and one slot per token of ``step``.

    Every token of the step must be sampled. Row t of the result has token t alone, in
    slot t, whose parameters are those of the token's slot. Its token counts include the
    tokens of the same row before t, as if they had been accepted. Fields that
    ``sample`` does not read are those of the step, or zeros.
    """
    count = step.tokens.shape[0]
    index = np.arange(count, dtype=np.int32)
    used = index < step.used_counts[2]
    slots = np.where(used, step.slots[step.rows], 0)
    counts = tables.token_counts[slots]
    if counts.shape[1]:
        before = (step.rows[:, None] == step.rows) & (index[:, None] > index)
        before &= used[:, None] & used
        at, earlier = np.nonzero(before)
        np.add.at(counts, (at, step.tokens[earlier]), 2)
    expanded = step._replace(
        starts=np.arange(count + 1, dtype=np.int32),
        slots=index,
        samples=index,
        used_counts=np.full(3, step.used_counts[2], np.int32),
    )
    zeros = np.zeros(count, np.int32)
    return expanded, Tables(
        blocks=np.zeros((1, count, tables.blocks.shape[2]), np.int32),
        lengths=zeros,
        last=zeros,
        adapters=zeros,
        params=tables.params[slots],
        token_counts=counts,
        bias=tables.bias[slots],
    )


def _verify_cases(rng: np.random.Generator) -> Iterable[Case]:
    for name, pads, vocab in (
        ("rows", (0, 0), 11),
        ("padded", (3, 2), 11),
        ("uncounted", (0, 0), 0),
    ):
        step, tables = verify_step(rng, pads=pads, vocab=vocab)
        # Most drafts agree; one sample is invalid.
        tokens = np.append(step.tokens[1:], 7).astype(np.int32)
        tokens[[1, 9]] = rng.integers(0, 11, 2)
        for invalid in (None, 0, 4):
            sampled = tokens.copy()
            if invalid is not None:
                sampled[invalid] = -1
            case = f"{name}/{'valid' if invalid is None else f'invalid {invalid}'}"
            yield Case(case, (sampled, step, tables), {"width": 4})


def _verify_shapes(_tokens: Any, step: Any, tables: Any, *, width: int) -> Any:
    return Spec((step.slots.shape[0] * width,), "int32"), tables


def _verify_traffic(results: Any, tokens: Any, step: Any, _: Any, **__: Any) -> int:
    """Samples, drafts and results, and one entry of three tables per row."""
    return nbytes((results[0], tokens, step.tokens)) + 12 * int(step.slots.shape[0])


@op(
    shapes=_verify_shapes,
    cases=_verify_cases,
    consumes=("tables",),
    rounds=False,
    traffic=_verify_traffic,
    since=(1, 2),
)
def verify(
    tokens: Array, step: Step, tables: Tables, *, width: int
) -> tuple[Array, Tables]:
    """Accept each row's samples up to the first that differs from the next draft.

    tokens: int32 [T], the sample after each token of ``step``. width: W, most tokens of
    a row. A row accepts its first sample, and each further one while the sample before
    equals the row's token that follows, which was computed on that assumption.

    Returns the accepted samples of each row, int32 [R * W] filled with
    :data:`~inl.spec.step.NO_TOKEN`, and the tables: lengths without the rejected
    tokens, the last accepted samples (0 for an invalid one), and the tokens of the row
    whose samples are accepted added to the token counts.
    """
    counts = step.starts[1:] - step.starts[:-1]
    offsets = np.arange(width, dtype=np.int32)
    inside = offsets < counts[:, None]
    at = np.where(inside, step.starts[:-1, None] + offsets, 0)
    sampled = np.where(inside, tokens[at], NO_TOKEN)
    inputs = step.tokens[at]
    agrees = inside[:, 1:] & (sampled[:, :-1] == inputs[:, 1:])
    kept = inside & np.cumprod(np.pad(agrees, ((0, 0), (1, 0)), constant_values=1), 1)
    accepted = kept.sum(1).astype(np.int32)
    ends = np.maximum(accepted - 1, 0)
    last = np.take_along_axis(sampled, ends[:, None], 1)[:, 0].clip(min=0)
    updated = Tables(*tables)._replace(
        lengths=tables.lengths.copy(), last=tables.last.copy()
    )
    updated.lengths[step.slots] = step.lengths - (counts - accepted)
    updated.last[step.slots] = last
    if tables.token_counts.shape[1]:
        updated = updated._replace(token_counts=tables.token_counts.copy())
        fed = np.broadcast_to(step.slots[:, None], inputs.shape), inputs
        np.add.at(updated.token_counts, fed, 2 * kept.astype(np.int32))
    result = np.where(kept, sampled, NO_TOKEN).astype(np.int32)
    return result.reshape(-1), updated
