"""Recurrent layers over per-slot state: short convolutions and the gated delta rule.

A row that begins at position 0 starts with zeros; any other row continues the state of
its slot, so that a text may be computed in chunks of any size. The step leaves zeros in
slot 0, that of padding rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from inl.ops.attention import random_step
from inl.spec.op import Case, Sizes, Spec, elements, nbytes, op
from inl.spec.step import Array, Step

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys before its square root."""

LEAST_COSINE = 0.25
"""Of the angle between a query and its key in the cases of :data:`delta_rule`."""

SHORT = 2.0**-13
"""Factor on queries and keys of some cases of :data:`delta_rule`."""

DELTA_SIZES = ((1, 1, 4, 6), (2, 4, 8, 5))
"""(key heads, heads, d, n) of the cases of :data:`delta_rule`."""


class Taps(NamedTuple):
    """Parameters of :data:`causal_conv`."""

    weight: Array
    """[C, 1, K]: factors of each channel, that of the newest token last."""


class Decay(NamedTuple):
    """Parameters of :data:`delta_rule`."""

    rate: Array
    """[heads] float32: logarithm of each head's rate."""
    shift: Array
    """[heads] float32, added to ``a``."""


def row_steps(rng: np.random.Generator) -> Iterable[tuple[str, Step]]:
    """Yield steps of rows that begin and that continue, for 6 slots, by name."""
    yield "decode", random_step(rng, [5, 2, 9], [1, 1, 1])[0]
    mixed, _ = random_step(rng, [3, 8, 0, 4], [1, 1, 7, 3], pad_rows=2, pad_tokens=3)
    slots = np.concatenate([rng.permutation(np.arange(1, 5)), np.zeros(2)])
    yield "mixed", mixed._replace(slots=slots.astype(np.int32))


def _row_spans(step: Step) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the slot, the range of tokens and whether it is the first, of each row."""
    for row in range(int(step.used_counts[1])):
        start, stop = int(step.starts[row]), int(step.starts[row + 1])
        if stop > start:
            yield int(step.slots[row]), start, stop, not step.positions[start]


def table_traffic(results: Any, *inputs: Any, **_attrs: Any) -> int:
    """Inputs and results once, but only the rows' entries of the table."""
    table, step, w = inputs[-3:]
    entry = nbytes(table) // table.shape[0]
    used = 2 * step.slots.shape[0] * entry
    return int(nbytes((inputs[:-3], results[0], w)) + used)


def _conv_cases(rng: np.random.Generator) -> Iterable[Case]:
    for taps in (4, 2):
        for name, step in row_steps(rng):
            x = rng.standard_normal((step.tokens.shape[0], 6))
            table = rng.standard_normal((6, taps - 1, 6))
            w = Taps(rng.standard_normal((6, 1, taps)))
            yield Case(f"{name}/{taps}", (x, table, step, w))


@op(
    # The op's parameters by name: not each shape depends on all of them.
    shapes=lambda x, table, step, w: (Spec(x.shape, x.dtype), table),  # noqa: ARG005
    cases=_conv_cases,
    weights=Taps,
    consumes=("table",),
    flops=lambda x, _table, _step, w: 2 * x.shape[0] * elements(w.weight),
    traffic=table_traffic,
    since=(1, 2),
)
def causal_conv(x: Array, table: Array, step: Step, w: Taps) -> tuple[Array, Array]:
    """Convolution of each channel over a sequence's tokens.

    x: [T, C]. table: [slots, K - 1, C], the last inputs of each sequence, oldest first.
    Returns ``sum over i of w[i] * input[t - K + 1 + i]``, [T, C], and the table.
    """
    taps = w.weight.shape[-1]
    out, updated = np.zeros_like(x), table.copy()
    updated[0] = 0
    for slot, start, stop, first in _row_spans(step):
        before = np.zeros_like(table[slot]) if first else table[slot]
        seen = np.concatenate([before, x[start:stop]])
        count = stop - start
        out[start:stop] = sum(
            seen[i : i + count] * w.weight[:, 0, i] for i in range(taps)
        )
        updated[slot] = seen[count:]
    return out, updated


def decided_queries(q: Any, k: Any) -> Any:
    """Turn queries toward their key where they are nearly orthogonal to it.

    A first token reads ``(q @ k) * change``: the error of that sum of d products of
    unit vectors, relative to it, is the unit roundoff times up to ``1 / |cos(q, k)|``.
    """
    lengths = [np.sqrt(np.square(each).sum(-1, keepdims=True)) for each in (q, k)]
    cosine = (q * k).sum(-1, keepdims=True) / (lengths[0] * lengths[1])
    toward = np.copysign(lengths[0] / lengths[1], cosine) * k
    return np.where(np.abs(cosine) < LEAST_COSINE, q + toward, q)


def _delta_cases(
    rng: np.random.Generator, sizes: Sizes = DELTA_SIZES
) -> Iterable[Case]:
    for keys, heads, dim, width in sizes:
        for name, step in row_steps(rng):
            tokens = step.tokens.shape[0]
            q, k = rng.standard_normal((2, tokens, keys, dim))
            q = decided_queries(q, k)
            v = rng.standard_normal((tokens, heads, width))
            a, b = rng.standard_normal((2, tokens, heads))
            table = rng.standard_normal((6, heads, dim, width))
            w = Decay(rng.standard_normal(heads), rng.standard_normal(heads))
            args = q, k, v, a, b, table, step, w
            yield Case(f"{name}/{keys}x{heads}", args, {"tiled": False})
            if keys > 1:
                yield Case(f"{name}/{keys}x{heads}/tiled", args, {"tiled": True})
            # Keys so short that the epsilon is most of their length.
            args = SHORT * q, SHORT * k, *args[2:]
            yield Case(f"{name}/{keys}x{heads}/short", args, {"tiled": False})


@op(
    # The op's parameters by name: not each shape depends on all of them.
    shapes=lambda q, k, v, a, b, table, step, w, tiled: (  # noqa: ARG005 - as the op
        Spec(v.shape, v.dtype),
        table,
    ),
    cases=_delta_cases,
    weights=Decay,
    consumes=("table",),
    flops=lambda q, _k, v, *_, **__: 8 * elements(v) * q.shape[-1],
    traffic=table_traffic,
    # A query nearly orthogonal to what the keys wrote reads a small sum of large terms.
    tolerance=4.0,
    since=(1, 2),
)
def delta_rule(
    q: Array, k: Array, v: Array, a: Array, b: Array, table: Array, step: Step,
    w: Decay, *, tiled: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Gated delta rule (Yang et al., 2024): a matrix per head that keys write to.

    q, k: [T, key_heads, d], scaled here to the length 1 by ``1 / sqrt(length^2 +
    1e-6)``; v: [T, heads, n], where ``heads / key_heads`` heads share a key: adjacent
    ones, or with ``tiled`` each ``key_heads``-th. a, b: [T, heads]. table: [slots,
    heads, d, n] float32, the matrix S of each sequence. For each token, in float32: ``S
    = exp(-exp(rate) * softplus(a + shift)) * S``, then ``S = S + outer(k, sigmoid(b) *
    (v - k @ S))``. Returns ``q @ S / sqrt(d)``, [T, heads, n], and the table.
    """
    share = v.shape[1] // q.shape[1]
    q, k = (_unit(each) for each in (q, k))
    if tiled:
        q, k = (np.tile(each, (1, share, 1)) for each in (q, k))
    else:
        q, k = (np.repeat(each, share, axis=1) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    keep = np.exp(-np.exp(w.rate) * np.logaddexp(0, a + w.shift))
    strength = 0.5 + 0.5 * np.tanh(0.5 * b)
    out, updated = np.zeros_like(v), table.copy()
    updated[0] = 0
    for slot, start, stop, first in _row_spans(step):
        matrix = 0 * table[slot] if first else table[slot]
        for t in range(start, stop):
            matrix = matrix * keep[t][:, None, None]
            change = strength[t][:, None] * (v[t] - _read(k[t], matrix))
            matrix = matrix + k[t][:, :, None] * change[:, None, :]
            out[t] = _read(q[t], matrix)
        updated[slot] = matrix
    return out, updated


def _unit(x: Any) -> Any:
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + LENGTH_EPS)


def _read(key: Any, matrix: Any) -> Any:
    """Return ``key @ matrix`` of each head: [heads, n]."""
    return (key[:, None, :] @ matrix)[:, 0]
