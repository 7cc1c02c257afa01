"""Repacking of quantized matrices as blocks."""

from __future__ import annotations

import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.blocks.encode import encode
from inl.checkpoints.quantized.matrix import QuantMatrix, halves

RNG = np.random.default_rng(5)


def test_float16_stores_values_to_its_precision_or_not_at_all():
    values = RNG.uniform(1e-3, 1, 64).astype(np.float32)
    assert np.abs(halves(values) / values - 1).max() < 2.0**-11
    assert halves(np.float32([1, 7e4])) is None  # beyond its range
    assert halves(np.float32([2e-7, 1e-3])) is None  # a subnormal of few bits
    assert halves(np.float32([2e-7, 1e3])) is not None  # of no weight
    assert halves(np.float32([0, 0]))[0] == 0
    assert halves(np.float32([])) is not None


def test_offsets_are_compared_with_their_scales():
    offsets, scales = np.float32([1e-6]), np.float32([1e-3])
    assert halves(offsets) is None
    assert halves(offsets, 2.0**-8 * scales) is not None


def matrix(low, high, **given):
    codes = RNG.integers(low, high + 1, (6, 128)).astype(np.int8)
    scale = RNG.uniform(0.5, 2, (3, 2)).astype(np.float16).astype(np.float32)
    return QuantMatrix(codes, scale, rows=2, width=64, **given)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("q4_0", -8, 7), ("q4_1", 0, 15), ("q4_1", -8, 7), ("q8_0", -128, 127)],
)
def test_blocks_decode_to_the_same_values(dtype, low, high):
    given = matrix(low, high)
    assert np.array_equal(dequantize(given.blocks(dtype)), given.values().data)


@pytest.mark.parametrize("base", [0, -8])
def test_zeros_and_offsets_are_those_of_q4_1(base):
    zero = RNG.integers(base, base + 16, (3, 2)).astype(np.int32)
    offset = RNG.standard_normal((3, 2)).astype(np.float32)
    given = matrix(base, base + 15, zero=zero, offset=offset)
    expected = given.values().data
    found = dequantize(given.blocks("q4_1"))
    assert np.abs(found - expected).max() < 32 * 2.0**-11
    assert given.blocks("q4_0") is None
    assert given.blocks("q8_0") is None  # it has no offsets


def test_codes_out_of_range_are_not_stored():
    assert matrix(-9, 7).blocks("q4_0") is None
    assert matrix(0, 16).blocks("q4_1") is None


def test_rounding_to_8_bits_is_to_the_nearest_code():
    values = RNG.standard_normal((5, 96)).astype(np.float32) * 10.0 ** -RNG.integers(
        0, 3, (5, 1)
    ).astype(np.float32)
    values[2, 32:64] = 0
    found = dequantize(encode(values, "q8_0"))
    most = np.abs(values.reshape(5, 3, 32)).max(2).repeat(32, 1)
    assert (np.abs(found - values) <= most / 127 * (0.5 + 0.1)).all()
    assert (np.abs(found - values) > most / 127 * 0.3).any()
    assert not found[2, 32:64].any()
