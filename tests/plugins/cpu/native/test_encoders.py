"""Instructions of encoders, compared with the ops' bodies in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from native_harness import Op, f32, i32, instruction

from inl.ops.activation import KINDS
from inl.ops.full_attention import attend_sequences, starts_of
from inl.ops.norm import LayerNorm, layer_norm

TAIL = 5
"""Tokens of no sequence."""
# Sequences of more than a chunk's queries, and than the keys packed at a time.
LENGTHS = (70, 1, 0, 530, 16)


def attended(native, q, k, v, starts, *, scale, window=None, bias=None):
    tokens, heads, width = q.shape
    y = np.full(q.shape, np.nan, np.float32)
    distances = 0 if bias is None else len(bias) // 2
    dims = (
        tokens, heads, k.shape[1], width, len(starts) - 1,
        0 if window is None else window + 1, distances, q[0].size, k[0].size, v[0].size,
    )  # fmt: skip
    data = q, k, v, starts, bias, y
    native.run(instruction(Op.FULL_ATTENTION, dims, data, (scale,)))
    return y


def inputs(rng, heads, kv_heads, width, lengths=LENGTHS):
    tokens = sum(lengths) + TAIL
    q = f32(3 * rng.standard_normal((tokens, heads, width)))
    k, v = f32(rng.standard_normal((2, tokens, kv_heads, width)))
    return q, k, v, i32(starts_of(lengths))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "window", "distances"),
    [
        (2, 2, 16, None, 0),
        (4, 2, 9, None, 0),
        (3, 1, 24, 0, 0),
        (2, 2, 16, 40, 0),
        (1, 1, 33, 300, 0),
        (3, 3, 16, None, 20),
        (2, 2, 8, None, 128),
    ],
)
def test_full_attention(native, rng, heads, kv_heads, width, window, distances):
    q, k, v, starts = inputs(rng, heads, kv_heads, width)
    bias = f32(2 * rng.standard_normal((2 * distances + 1, heads)))
    bias = bias if distances else None
    given = {"scale": 0.4, "window": window, "bias": bias}
    found = attended(native, q, k, v, starts, **given)
    wide = (x.astype(np.float64) for x in (q, k, v))
    exact = attend_sequences(*wide, starts, *given.values())
    assert np.abs(found - exact).max() < 1e-5
    # A sequence has the same bits alone.
    begin, end = starts[3:5]
    alone = attended(native, *(x[begin:end].copy() for x in (q, k, v)),
                     i32([0, end - begin]), **given)  # fmt: skip
    assert np.array_equal(alone, found[begin:end])


def test_keys_of_one_sequence_only_are_read(native, rng):
    q, k, v, starts = inputs(rng, 2, 2, 16)
    before = attended(native, q, k, v, starts, scale=0.4)
    begin, end = starts[3:5]
    k[begin:end], v[begin:end] = np.nan, np.nan
    after = attended(native, q, k, v, starts, scale=0.4)
    assert np.isnan(after[begin:end]).all()
    assert np.array_equal(after[:begin], before[:begin])
    assert np.array_equal(after[end:], before[end:])


@pytest.mark.parametrize("width", [1, 16, 100, 384, 600])
@pytest.mark.parametrize("target", ["new", "x", "delta"])
def test_layer_norm(native, rng, width, target):
    x, delta = f32(5 * rng.standard_normal((2, 33, width)) + 3)
    weight, bias = f32(rng.standard_normal((2, width)))
    exact = layer_norm.body(
        x.astype(np.float64) + delta, LayerNorm(weight, bias), eps=1e-5
    )
    y = {"new": np.empty_like(x), "x": x, "delta": delta}[target]
    data = x, delta, weight, bias, y
    native.run(instruction(Op.LAYER_NORM, (33, width), data, (1e-5,)))
    assert np.abs(y - exact).max() < 3e-5


def test_gelu(native):
    x = f32([*np.linspace(-14, 14, 4001), -np.inf, np.inf, np.nan, -0.0, 1e-30, 1e38])
    y = np.empty_like(x)
    native.run(instruction(Op.ACTIVATE, (x.size, KINDS.index("gelu")), (x, y)))
    found, wide = y[:4001], x[:4001].tolist()
    exact = np.array([each * 0.5 * math.erfc(-each / math.sqrt(2)) for each in wide])
    assert np.abs(found - exact).max() < 1e-6
    near = np.abs(wide) < 4
    assert (np.abs(found - exact)[near] <= 2e-6 * np.abs(exact)[near]).all()
    np.testing.assert_allclose(y[4001:], [0, np.inf, np.nan, 0, 5e-31, 1e38], 1e-6)
