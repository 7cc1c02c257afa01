"""Rotation against complex numbers, frequencies against their published formulas."""

from __future__ import annotations

import cmath
import math

import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.rope import RopeScaling, frequencies, gains

ROPE, TABLE = catalog()["rope"].body, catalog()["rope_table"].body
PLAIN = RopeScaling()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 2), (4, 2, 8), (3, 3, 64)]
)
def test_rope_is_a_complex_rotation(heads, kv_heads, dim):
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


def test_scores_depend_only_on_the_distance():
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
    """The scaling of Llama 3.1's reference code, one frequency at a time."""
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


def test_yarn_scales_only_low_frequencies():
    """The ends of the ramp follow the paper's formula, rounded outward."""
    scaling = RopeScaling("yarn", 4.0, 1.0, 32.0, 2048, gain=1.14)
    plain = [1e4 ** (-2 * i / 64) for i in range(32)]

    def place(turns):
        return 64 * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(1e4))

    first, last = math.floor(place(32.0)), math.ceil(place(1.0))
    expected = []
    for index, rate in enumerate(plain):
        slowed = min(max((index - first) / (last - first), 0.0), 1.0)
        expected.append(rate * (1 - slowed) + rate / 4 * slowed)
    found = frequencies(64, 1e4, scaling)
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[0] == plain[0]
    assert found[-1] == pytest.approx(plain[-1] / 4)
    assert 0 < first < last < 31


def test_planes_beyond_rotary_dim_do_not_rotate():
    scaling = RopeScaling("divided", divisors=(1.0, 2.0, 5.0), gain=1.3, rotary_dim=6)
    rates = frequencies(16, 100.0, scaling)
    expected = [100.0 ** (-2 * i / 6) / by for i, by in enumerate((1.0, 2.0, 5.0))]
    assert rates == pytest.approx([*expected, 0, 0, 0, 0, 0], rel=1e-14)
    assert gains(16, scaling).tolist() == [1.3] * 3 + [1.0] * 5
    positions = np.array([0, 9], np.int32)
    cos, sin = TABLE(positions, dim=16, theta=100.0, scaling=scaling)
    assert np.allclose(np.hypot(cos, sin), gains(16, scaling))
    assert (cos[:, 3:] == 1).all()
    assert (sin[:, 3:] == 0).all()
