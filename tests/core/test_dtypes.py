"""Rounding to bfloat16 against exact fractions, and the bytes of every dtype."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inl.checkpoints.blocks.decode_32 import E4M3
from inl.dtypes import (
    EPSILON,
    FLOATS,
    SIZES,
    HostArray,
    cast,
    rounded,
    rounded_e4m3,
    widen,
    wrap,
)  # fmt: skip


def value_of(bits):
    """A finite bfloat16 as an exact number, by the definition of its fields."""
    sign = -1 if bits >> 15 else 1
    exponent, fraction = (bits >> 7) & 0xFF, bits & 0x7F
    if exponent == 0:
        return sign * Fraction(fraction, 2**133)
    return sign * Fraction(128 + fraction) * Fraction(2) ** (exponent - 134)


def nearest(value):
    """Bits of the bfloat16 nearest to a float, ties to the even one."""
    sign = 0x8000 if np.signbit(np.float32(value)) else 0
    exact = abs(Fraction(float(value)))
    low, high = 0, 0x7F7F
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if value_of(middle) <= exact else (low, middle - 1)
    below = value_of(low)
    # Beyond the largest number the next step would be 2**128, which is infinity.
    above = Fraction(2) ** 128 if low == 0x7F7F else value_of(low + 1)
    if exact - below > above - exact or (exact - below == above - exact and low & 1):
        low += 1
    return sign | low


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@example(1 + 2.0**-8)
@example(1 + 3 * 2.0**-8)
@example(3.4028234663852886e38)
@example(2.0**-149)
@example(-0.0)
def test_bfloat16_rounds_to_nearest_even(value):
    found = cast(np.array([value], np.float32), "bfloat16")
    assert int(found.data[0]) == nearest(value)


def test_every_bfloat16_is_widened_exactly_and_comes_back():
    bits = np.arange(2**16, dtype=np.uint16)
    wide = widen(HostArray(bits, "bfloat16", bits.shape))
    assert wide.dtype == np.float32
    finite = np.isfinite(wide)
    for index in range(0, 2**16, 97):
        if finite[index]:
            assert Fraction(float(wide[index])) == value_of(index)
    back = cast(wide, "bfloat16").data
    assert np.array_equal(back[~np.isnan(wide)], bits[~np.isnan(wide)])
    assert np.isnan(widen(cast(wide[np.isnan(wide)], "bfloat16"))).all()


def test_infinities_and_nan_are_preserved():
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    found = widen(cast(values, "bfloat16"))
    assert found[0] == np.inf
    assert found[1] == -np.inf
    assert np.isnan(found[2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_epsilon_is_the_gap_above_one(dtype):
    step = EPSILON[dtype]
    values = np.array([1 + step, 1 + step / 4])
    assert rounded(values, dtype).tolist() == [1 + step, 1.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounded_keeps_the_dtype_that_holds_it(dtype):
    values = np.array([[1.2345678, -3.0], [0.0, 7e-3]])
    found = rounded(values, dtype)
    assert found.dtype == values.dtype
    assert found.shape == values.shape
    assert np.array_equal(rounded(found, dtype), found)
    assert np.abs(found - values).max() <= EPSILON[dtype] * 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounded_e4m3_is_the_nearest_code_with_ties_to_even(dtype):
    """Against the decoded codes 0 to 126, of which even ones end in 0."""
    grid = E4M3[:127].astype(np.float64)
    assert np.array_equal(rounded_e4m3(-grid.astype(dtype)), -grid)
    ties = ((grid[1:] + grid[:-1]) / 2).astype(dtype)
    even = grid[np.arange(126) + np.arange(126) % 2]
    assert np.array_equal(rounded_e4m3(ties), even)
    above, below = (np.nextafter(ties, dtype(way)) for way in (500, 0))
    assert np.array_equal(rounded_e4m3(above), grid[1:])
    assert np.array_equal(rounded_e4m3(below), grid[:-1])
    extreme = rounded_e4m3(np.array([1e30, -np.inf, 449, np.nan], dtype))
    assert np.array_equal(extreme, [448, -448, 448, np.nan], equal_nan=True)
    assert extreme.dtype == dtype


def test_sizes_are_numpys():
    for dtype, size in SIZES.items():
        if dtype != "bfloat16":
            assert np.dtype(dtype).itemsize == size
    assert cast(np.zeros(3), "bfloat16").data.itemsize == SIZES["bfloat16"]


def test_a_host_array_has_a_logical_shape():
    packed = HostArray(np.zeros((2, 40), np.uint8), "q4_1", (2, 64))
    assert packed.size == 128
    with pytest.raises(TypeError, match="'q4_1' is packed"):
        widen(packed)
    flat = HostArray(np.arange(6, dtype=np.int32), "int32", (2, 3))
    assert widen(flat).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert wrap(np.zeros((2, 3), np.float16)).dtype == "float16"
