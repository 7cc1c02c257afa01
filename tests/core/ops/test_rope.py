"""Rotation against complex numbers, frequencies against their published formulas."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.rope import RopeScaling, frequencies

ROPE, TABLE = catalog()["rope"].body, catalog()["rope_table"].body
PLAIN = RopeScaling()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 2), (4, 2, 8), (3, 3, 64)]
)
def test_rope_multiplies_by_a_unit_number(heads, kv_heads, dim):
    rng = np.random.default_rng(dim)
    positions = np.array([0, 1, 5, 1000], np.int32)
    cos, sin = TABLE(positions, dim=dim, theta=500.0, scaling=PLAIN)
    q = rng.standard_normal((4, heads, dim))
    k = rng.standard_normal((4, kv_heads, dim))
    for x, found in zip((q, k), ROPE(q, k, cos, sin), strict=True):
        for token, position in enumerate(positions):
            for head in range(x.shape[1]):
                for i in range(dim // 2):
                    turn = cmath.exp(1j * int(position) * 500.0 ** (-2 * i / dim))
                    a, b = x[token, head, i], x[token, head, i + dim // 2]
                    z = complex(a, b) * turn
                    assert abs(found[token, head, i] - z.real) < 1e-11
                    assert abs(found[token, head, i + dim // 2] - z.imag) < 1e-11


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 16))

    def score(at, to):
        pairs = [
            TABLE(np.array([p], np.int32), dim=16, theta=1e4, scaling=PLAIN)
            for p in (at, to)
        ]
        return (ROPE(q, q, *pairs[0])[0] * ROPE(k, k, *pairs[1])[0]).sum()

    assert score(7, 3) == pytest.approx(score(1004, 1000), rel=1e-9)
    assert abs(score(7, 3) - score(8, 3)) > 1e-3


def published(rate, scaling):
    """Llama 3.1's rule as its reference code states it, one frequency at a time."""
    wave = 2 * math.pi / rate
    if wave < scaling.original / scaling.high:
        return rate
    if wave > scaling.original / scaling.low:
        return rate / scaling.factor
    smooth = (scaling.original / wave - scaling.low) / (scaling.high - scaling.low)
    return (1 - smooth) * rate / scaling.factor + smooth * rate


def test_scaled_frequencies():
    plain = [500000.0 ** (-2 * i / 64) for i in range(32)]
    assert frequencies(64, 500000.0, PLAIN) == pytest.approx(plain, rel=1e-14)
    linear = frequencies(64, 500000.0, RopeScaling("linear", 4.0))
    assert linear == pytest.approx([rate / 4 for rate in plain], rel=1e-14)
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    expected = [published(rate, scaling) for rate in plain]
    assert frequencies(64, 500000.0, scaling) == pytest.approx(expected, rel=1e-12)
    kept = sum(a == b for a, b in zip(expected, plain, strict=True))
    slowed = sum(a == b / 8 for a, b in zip(expected, plain, strict=True))
    assert min(kept, slowed, 32 - kept - slowed) > 0
