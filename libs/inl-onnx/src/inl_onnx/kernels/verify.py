"""Verification of drafted tokens."""

from __future__ import annotations

from inl.spec.step import NO_TOKEN, Step, Tables
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel


def expand_rows(step: Step, tables: Tables) -> tuple[Step, Tables]:
    total = step.tokens.shape[0]
    index = fn.arange(step.tokens, total)
    used = index < step.used_counts[2]
    slots = fn.where(used, fn.take(step.slots, step.rows), 0)
    counts = fn.take(tables.token_counts, slots)
    vocab = counts.shape[1]
    if vocab:
        before = step.rows[:, None].equal(step.rows) & (index[:, None] > index)
        before = before & used[:, None] & used
        ids = fn.broadcast_to(step.tokens, (total, total))
        added = fn.totals(ids, before.astype("float32"), vocab)
        counts = counts + added.astype("int32") * 2
    expanded = step._replace(
        starts=fn.arange(index, total + 1),
        slots=index,
        samples=index,
        used_counts=fn.broadcast_to(step.used_counts[2], (3,)),
    )
    zeros = fn.full(index, (total,), 0, "int32")
    return expanded, Tables(
        blocks=fn.full(index, (1, total, tables.blocks.shape[2]), 0, "int32"),
        lengths=zeros,
        last=zeros,
        adapters=zeros,
        params=fn.take(tables.params, slots),
        token_counts=counts,
        bias=fn.take(tables.bias, slots),
    )


def verify(
    tokens: Value, step: Step, tables: Tables, *, width: int
) -> tuple[Value, Tables]:
    counts = step.starts[1:] - step.starts[:-1]
    offsets = fn.arange(tokens, width)
    inside = offsets < counts[:, None]
    at = fn.where(inside, step.starts[:-1, None] + offsets, 0)
    sampled = fn.where(inside, fn.take(tokens, at), NO_TOKEN)
    inputs = fn.take(step.tokens, at)
    first = fn.full(tokens, (counts.shape[0], 1), 0, "int32")
    differs = ~(inside[:, 1:] & sampled[:, :-1].equal(inputs[:, 1:]))
    rejected = fn.concatenate([first, differs.astype("int32")], 1)
    accepted = inside & (fn.cumsum(rejected) < 1)
    number = fn.sum_of(accepted.astype("int32"))
    ends = fn.maximum(number - 1, 0)[:, None]
    last = fn.maximum(fn.take_along(sampled, ends)[:, 0], 0)
    remaining = step.lengths - (counts - number)
    seen, vocab = tables.token_counts, tables.token_counts.shape[1]
    if vocab:
        added = fn.totals(inputs, accepted.astype("float32"), vocab)
        rows = fn.take(seen, step.slots) + added.astype("int32") * 2
        seen = fn.put(seen, [step.slots], rows)
    tables = tables._replace(
        lengths=fn.put(tables.lengths, [step.slots], remaining),
        last=fn.put(tables.last, [step.slots], last),
        token_counts=seen,
    )
    return fn.where(accepted, sampled, NO_TOKEN).reshape(-1), tables


KERNELS = (kernel(expand_rows), kernel(verify))
