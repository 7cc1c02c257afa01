"""Encoders of blocks: nearest codes by float64, no worse than the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.blocks.encode import ENCODERS, encode
from inl.errors import CheckpointError
from inl.weights.finite import check_finite
from quantized_blocks import decoded, e4m3_values


def samples(seed):
    """Rows of many magnitudes, outliers, zeros and ties."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((64, 96)) * np.exp2(rng.integers(-18, 12, (64, 1)))
    values[3, :32], values[4, 5], values[5, 40] = 0, 50 * abs(values[4]).max(), 0
    values[6] = values[6, 0]  # a constant block
    values[7] = np.round(values[7] / values[7].max() * 15)
    return values.astype(np.float32)


@pytest.mark.parametrize("dtype", ENCODERS)
def test_decoded_blocks_equal_float64(dtype):
    blocks = encode(samples(1), dtype)
    exact = decoded(blocks)
    found = dequantize(blocks)
    assert np.abs(found - exact).max() <= 2.0**-23 * np.abs(exact).max()
    np.testing.assert_allclose(found, exact, rtol=2e-6, atol=1e-5 * np.abs(exact).min())


@pytest.mark.parametrize("dtype", ["q8_0", "q4_1"])
def test_codes_are_the_nearest_of_their_scale(dtype):
    values = samples(2)
    found = decoded(encode(values, dtype)).reshape(-1, 32)
    values = values.reshape(-1, 32).astype(np.float64)
    heads = encode(samples(2), dtype).data.reshape(len(values), -1)[:, :4].copy()
    heads = heads.view("<f2").astype(np.float64)
    codes = np.arange(16) if dtype == "q4_1" else np.arange(-127, 128)
    offsets = heads[:, 1:] if dtype == "q4_1" else 0
    grid = (heads[:, :1] * codes + offsets)[:, None]
    nearest = np.abs(values[..., None] - grid).min(-1)
    # Values as near to a tie as float32 rounds may become either neighbor.
    room = 1e-5 * (np.abs(values).max(1, keepdims=True) + np.abs(grid[:, 0, -1:]))
    assert (np.abs(found - values) <= nearest + room).all()


def test_e4m3_is_the_nearest_for_the_least_power_of_two():
    values = samples(3).reshape(-1, 32)
    blocks = encode(values, "mxfp8")
    exponent = blocks.data.reshape(-1, 33)[:, 0].astype(int) - 127
    scaled = values.astype(np.float64) / 2.0 ** exponent[:, None]
    largest = np.abs(scaled).max(1)
    assert (largest <= 448).all()
    assert ((largest > 224) | (largest == 0)).all()
    grid = np.unique(e4m3_values()[np.isfinite(e4m3_values())])
    nearest = np.abs(scaled[..., None] - grid).min(-1)
    found = decoded(blocks) / 2.0 ** exponent[:, None]
    assert np.array_equal(np.abs(found - scaled), nearest)


def test_ties_of_e4m3_go_to_even():
    wide = np.zeros((1, 32), np.float32)
    wide[0, :6] = [448, 17, 19, -17, 2.0**-10, 3 * 2.0**-10]
    found = dequantize(encode(wide, "mxfp8"))[0, :6]
    assert found.tolist() == [448, 16, 20, -16, 0, 2.0**-8]


@pytest.mark.parametrize("dtype", ["q8_0", "q4_1"])
def test_errors_are_not_above_those_of_gguf(dtype):
    rng = np.random.default_rng(4)
    values = (rng.standard_normal((64, 512)) * 0.02).astype(np.float32)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    outside = gguf.dequantize(gguf.quantize(values, kind), kind)
    blocks = encode(values, dtype)
    assert np.array_equal(gguf.dequantize(blocks.data, kind), dequantize(blocks))
    ours, theirs = (np.linalg.norm(x - values) for x in (dequantize(blocks), outside))
    assert ours <= theirs * (1.001 if dtype == "q8_0" else 0.97)


@pytest.mark.parametrize("dtype", ENCODERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_nan_or_infinity_is_refused_when_it_is_loaded(dtype, bad):
    values = samples(5)
    check_finite(encode(values, dtype), "w")
    values[2, 40] = bad
    with pytest.raises(CheckpointError, match=r"^w: found .* at \[2, (3|4|5|6)\d\]"):
        check_finite(encode(values, dtype), "w")
