"""Scan of Mamba-2: products of chunks of tokens, of all rows at once."""

from __future__ import annotations

from inl.ops.ssm import Ssm, chunk_size
from inl.spec.step import Step
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel


def ssm_scan(
    x: Value, b: Value, c: Value, dt: Value, table: Value, step: Step, w: Ssm
) -> tuple[Value, Value]:
    (total, heads, width), (groups, dim) = x.shape, b.shape[1:]
    rows = step.slots.shape[0]
    used = fn.arange(step.slots, rows) < step.used_counts[1]
    starts = step.starts[:-1]
    counts = fn.where(used, step.starts[1:] - starts, 0).reshape(-1, 1)
    begins = fn.minimum(starts, total - 1)
    later = (used & (fn.take(step.positions, begins) > 0)).reshape(-1, 1, 1, 1)
    states = fn.where(later, fn.upcast(fn.take(table, step.slots)), 0)
    time = fn.softplus(fn.upcast(dt) + fn.upcast(w.shift))
    decays = fn.exp(fn.upcast(w.rate)) * time * -1.0
    wide = fn.upcast(x)
    timed = wide * time.reshape(total, heads, 1)

    def spread(given: Value) -> Value:
        every = (total, groups, heads // groups, dim)
        given = fn.upcast(given).reshape(total, groups, 1, dim)
        return fn.broadcast_to(given, every).reshape(total, heads, dim)

    keys, queries = spread(b), spread(c)
    size = chunk_size(total, rows)
    order = fn.arange(step.slots, size)
    before = order.reshape(-1, 1) > order
    since = order.reshape(-1, 1) >= order
    # The last result is that of no token.
    results = fn.full(timed, (total + 1, heads, width), 0, timed.dtype)
    for at in range(0, total, size):
        inside = order + at < counts
        tokens = fn.minimum(begins.reshape(-1, 1) + order + at, total - 1)
        mask = inside.reshape(rows, size, 1)

        def read(given: Value, tokens: Value = tokens, mask: Value = mask) -> Value:
            """Return [R, heads, L, ...]."""
            lanes = given.reshape(total, heads, -1)
            found = fn.where(mask.reshape(rows, size, 1, 1), fn.take(lanes, tokens), 0)
            return fn.transpose(found, 0, 2, 1, 3)

        key, query, value, decay = map(read, (keys, queries, timed, decays))
        turned = fn.transpose(key, 0, 1, 3, 2)
        # Differences of running sums would lose small decays behind a large one.
        after = fn.where(before, decay, 0)
        between = fn.where(since, fn.exp(fn.cumsum(after, 2)), 0)
        running = fn.exp(fn.cumsum(decay, 2))
        found = fn.matmul(fn.matmul(query, turned) * between, value)
        found = found + running * fn.matmul(query, states)
        last = fn.exp(fn.sum_of(after, 2)).reshape(rows, heads, size, 1) * value
        states = states * running[:, :, size - 1 :] + fn.matmul(turned, last)
        places = fn.where(inside, tokens, total)
        results = fn.put(results, [places], fn.transpose(found, 0, 2, 1, 3))
    out = results[:total] + wide * fn.upcast(w.skip).reshape(heads, 1)
    table = fn.put(table, [step.slots], states.astype(table.dtype))
    empty = fn.full(table, (1, *table.shape[1:]), 0, table.dtype)
    return out.astype(x.dtype), fn.concatenate([empty, table[1:]], 0)


KERNELS = (kernel(ssm_scan),)
