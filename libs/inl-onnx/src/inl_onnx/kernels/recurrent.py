"""Recurrent layers: the delta rule is repeated as often as a step has tokens."""

from __future__ import annotations

from collections.abc import Callable

from inl.ops.recurrent import LENGTH_EPS, Decay, Taps
from inl.spec.step import Step
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel


def _scan(
    out: Value,
    table: Value,
    step: Step,
    advance: Callable[[Value, Value], tuple[Value, Value]],
) -> tuple[Value, Value]:
    """Apply ``advance(tokens [R], states) -> (outputs, states)`` to each row's tokens.

    Returns the outputs, shaped as ``out``, and the table with the last states.
    """
    total, shape = out.shape[0], (-1, *(1,) * (len(table.shape) - 1))
    used = fn.arange(step.slots, step.slots.shape[0]) < step.used_counts[1]
    starts = step.starts[:-1]
    counts = fn.where(used, step.starts[1:] - starts, 0)
    begins = fn.minimum(starts, total - 1)
    later = used & (fn.take(step.positions, begins) > 0)
    states = fn.upcast(fn.take(table, step.slots))
    states = fn.where(later.reshape(*shape), states, 0)
    # The last result is that of no token.
    results = fn.full(out, (total + 1, *out.shape[1:]), 0, out.dtype)
    for at in range(total):
        live = counts > at
        tokens = fn.minimum(begins + at, total - 1)
        found, changed = advance(tokens, states)
        places = fn.where(live, tokens, total)
        results = fn.put(results, [places], found.astype(out.dtype))
        states = fn.where(live.reshape(*shape), changed, states)
    table = fn.put(table, [step.slots], states.astype(table.dtype))
    empty = fn.full(table, (1, *table.shape[1:]), 0, table.dtype)
    return results[:total], fn.concatenate([empty, table[1:]], 0)


def causal_conv(x: Value, table: Value, step: Step, w: Taps) -> tuple[Value, Value]:
    channels, _, taps = w.weight.shape
    total, kept = x.shape[0], taps - 1
    weights = fn.transpose(fn.upcast(w.weight).reshape(channels, taps), 1, 0)
    used = fn.arange(step.slots, step.slots.shape[0]) < step.used_counts[1]
    starts = step.starts[:-1]
    begins = fn.minimum(starts, total - 1)
    later = used & (fn.take(step.positions, begins) > 0)
    before = fn.upcast(fn.take(table, step.slots))
    before = fn.where(later.reshape(-1, 1, 1), before, 0).reshape(-1, channels)
    given = fn.upcast(x)

    def inputs(rows: Value, at: Value) -> Value:
        """Return inputs of rows, counted from the first one that the table has."""
        token = fn.clip(fn.take(starts, rows) + at - kept, 0, total - 1)
        stored = fn.take(before, rows * kept + fn.minimum(at, kept - 1))
        is_stored = (at < kept).reshape(*at.shape, 1)
        return fn.where(is_stored, stored, fn.take(given, token))

    tokens = fn.arange(step.slots, total)
    at = tokens - fn.take(starts, step.rows)
    out = inputs(step.rows, at) * weights[0]
    for tap in range(1, taps):
        out = out + inputs(step.rows, at + tap) * weights[tap]
    out = fn.where((tokens < step.used_counts[2]).reshape(-1, 1), out, 0)
    counts = fn.where(used, step.starts[1:] - starts, 0)
    last = counts.reshape(-1, 1) + fn.arange(step.slots, kept)
    rows = fn.arange(step.slots, step.slots.shape[0]).reshape(-1, 1)
    states = inputs(fn.broadcast_to(rows, last.shape), last).astype(table.dtype)
    table = fn.put(table, [step.slots], states)
    empty = fn.full(table, (1, *table.shape[1:]), 0, table.dtype)
    return out.astype(x.dtype), fn.concatenate([empty, table[1:]], 0)


def delta_rule(
    q: Value, k: Value, v: Value, a: Value, b: Value, table: Value, step: Step,
    w: Decay, *, tiled: bool,
) -> tuple[Value, Value]:  # fmt: skip
    tokens, heads, width = v.shape
    keys, dim = q.shape[1:]

    def spread(x: Value) -> Value:
        wide = fn.upcast(x)
        length = fn.sum_of(wide * wide, keepdims=True) + LENGTH_EPS
        share = heads // keys
        unit = wide / length.node("Sqrt")
        one = (tokens, 1, keys, dim) if tiled else (tokens, keys, 1, dim)
        all_ = (tokens, share, keys, dim) if tiled else (tokens, keys, share, dim)
        return fn.broadcast_to(unit.reshape(*one), all_).reshape(tokens, heads, dim)

    q, k, values = spread(q) * dim**-0.5, spread(k), fn.upcast(v)
    rates = fn.exp(fn.upcast(w.rate)) * fn.softplus(fn.upcast(a) + fn.upcast(w.shift))
    keep = fn.exp(rates * -1.0).reshape(tokens, heads, 1, 1)
    strength = fn.sigmoid(fn.upcast(b)).reshape(tokens, heads, 1, 1)

    def advance(at: Value, states: Value) -> tuple[Value, Value]:
        key = fn.take(k, at).reshape(-1, heads, 1, dim)
        states = states * fn.take(keep, at)
        value = fn.take(values, at).reshape(-1, heads, 1, width)
        change = (value - fn.matmul(key, states)) * fn.take(strength, at)
        states = states + fn.transpose(key, 0, 1, 3, 2) * change
        read = fn.matmul(fn.take(q, at).reshape(-1, heads, 1, dim), states)
        return read.reshape(-1, heads, width), states

    return _scan(v, table, step, advance)


KERNELS = (kernel(causal_conv), kernel(delta_rule))
