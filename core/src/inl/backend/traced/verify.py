"""Verification of drafted tokens."""

from __future__ import annotations

from typing import Any

from inl.spec.step import NO_TOKEN, Array, Step, Tables


def expand_rows(xp: Any, step: Step, tables: Tables) -> tuple[Step, Tables]:
    total = step.tokens.shape[0]
    index = xp.arange(step.tokens, total)
    used = index < step.used_counts[2]
    slots = xp.where(used, xp.take(step.slots, step.rows), 0)
    counts = xp.take(tables.token_counts, slots)
    if counts.shape[1]:
        before = xp.equal(step.rows[:, None], step.rows) & (index[:, None] > index)
        before = before & used[:, None] & used
        ids = xp.broadcast_to(step.tokens, (total, total))
        counts = xp.counted(counts, None, ids, before, 2)
    expanded = step._replace(
        starts=xp.arange(index, total + 1),
        slots=index,
        samples=index,
        used_counts=xp.broadcast_to(step.used_counts[2], (3,)),
    )
    zeros = xp.full(index, (total,), 0, "int32")
    return expanded, Tables(
        blocks=xp.full(index, (1, total, tables.blocks.shape[2]), 0, "int32"),
        lengths=zeros,
        last=zeros,
        adapters=zeros,
        params=xp.take(tables.params, slots),
        token_counts=counts,
        bias=xp.take(tables.bias, slots),
    )


def verify(
    xp: Any, tokens: Array, step: Step, tables: Tables, *, width: int
) -> tuple[Array, Tables]:
    counts = step.starts[1:] - step.starts[:-1]
    offsets = xp.arange(tokens, width)
    inside = offsets < counts[:, None]
    at = xp.where(inside, step.starts[:-1, None] + offsets, 0)
    sampled = xp.where(inside, xp.take(tokens, at), NO_TOKEN)
    inputs = xp.take(step.tokens, at)
    first = xp.full(tokens, (counts.shape[0], 1), 0, "int32")
    differs = ~(inside[:, 1:] & xp.equal(sampled[:, :-1], inputs[:, 1:]))
    rejected = xp.concatenate([first, differs.astype("int32")], 1)
    accepted = inside & (xp.cumsum(rejected) < 1)
    number = xp.sum_of(accepted.astype("int32"))
    ends = xp.maximum(number - 1, 0)[:, None]
    last = xp.maximum(xp.take_along(sampled, ends)[:, 0], 0)
    remaining = step.lengths - (counts - number)
    seen = tables.token_counts
    if seen.shape[1]:
        seen = xp.counted(seen, step.slots, inputs, accepted, 2)
    tables = tables._replace(
        lengths=xp.put(tables.lengths, [step.slots], remaining),
        last=xp.put(tables.last, [step.slots], last),
        token_counts=seen,
    )
    return xp.where(accepted, sampled, NO_TOKEN).reshape(-1), tables


def own_slots(xp: Any, step: Step) -> tuple[Array, Step]:
    slots = step.slots
    rows = slots.shape[0]
    number = xp.arange(slots, rows + 1, 1)
    own = xp.where(number <= step.used_counts[1], number, 0)
    index = xp.concatenate([xp.full(slots, (1,), 0, "int32"), slots], 0)
    return index, step._replace(slots=own, plan=())


def accepted_rows(
    xp: Any, kept: Array, step: Step, *, width: int
) -> tuple[Array, Step]:
    rows, total = step.slots.shape[0], step.tokens.shape[0]
    rejected = xp.equal(kept.reshape(rows, width), NO_TOKEN)
    counts = width - xp.sum_of(rejected.astype("int32"))
    ends = xp.cumsum(counts)
    starts = xp.concatenate([xp.full(kept, (1,), 0, "int32"), ends], 0)
    number = xp.arange(kept, total)
    passed = (number[:, None] >= ends).astype("int32")
    row = xp.minimum(xp.sum_of(passed), rows - 1)
    index = xp.take(step.starts, row) + number - xp.take(starts, row)
    index = xp.where(number < ends[-1:], index, 0)
    return index, step._replace(
        tokens=xp.take(step.tokens, index),
        positions=xp.take(step.positions, index),
        rows=row,
        starts=starts,
        used_counts=xp.concatenate([step.used_counts[:2], ends[-1:]], 0),
        plan=(),
    )
