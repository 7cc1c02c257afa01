"""Encoders of GGUF's blocks: bytes of the gguf package, float64 and importance."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.blocks.encode_gguf import GGUF_ENCODERS, encode_gguf
from inl.dtypes import cast

EXACT = ("q8_0", "q4_0", "q5_0", "q5_1")
K_KINDS = {"q4_k": 15, "q5_k": 31, "q6_k": 63}


def decoded(blocks):
    """What the gguf package decodes."""
    kind = gguf.GGMLQuantizationType[blocks.dtype.upper()]
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks.data, kind).astype(np.float64)


def samples(seed, shape=(48, 512)):
    """Rows of many magnitudes, outliers, zeros, constants, ties and one sign."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-18, 12, (shape[0], 1)))
    values[3, :256], values[4, 5] = 0, 50 * abs(values[4]).max()
    values[5], values[6] = values[5, 0], abs(values[6])
    values[7], values[8] = -abs(values[7]), np.round(4 * values[8])
    values[9, ::2] = 0
    return values.astype(np.float32)


def weights(seed, shape=(64, 1024)):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 0.02).astype(np.float32)


@pytest.mark.parametrize("dtype", EXACT)
def test_bytes_are_those_of_the_gguf_package(dtype):
    values = samples(1)
    expected = gguf.quantize(values, gguf.GGMLQuantizationType[dtype.upper()])
    assert np.array_equal(encode_gguf(values, dtype).data, expected)


def test_bfloat16_is_that_of_the_gguf_package():
    values = samples(2)
    values[0, :3] = np.nan, np.inf, -np.inf
    expected = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
    found = cast(values, "bfloat16").data.view(np.uint8)
    finite = np.isfinite(values).repeat(2, 1)
    assert np.array_equal(found[finite], expected[finite])


@pytest.mark.parametrize("dtype", GGUF_ENCODERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gguf_package_decodes_the_same_numbers(dtype, weighted):
    importance = np.linspace(0, 3, 512).astype(np.float32) if weighted else None
    blocks = encode_gguf(samples(3), dtype, importance)
    assert np.array_equal(decoded(blocks), dequantize(blocks))


def grid(blocks, dtype):
    """All numbers of each element's group in float64: [blocks, groups, codes]."""
    raw = blocks.data.reshape(-1, gguf.GGML_QUANT_SIZES[
        gguf.GGMLQuantizationType[dtype.upper()]][1])  # fmt: skip

    def half(at):
        return raw[:, at : at + 2].copy().view("<f2").astype(np.float64)

    if dtype == "q6_k":
        scales = half(208) * raw[:, 192:208].view(np.int8)
        return scales[:, :, None] * np.arange(-32, 32)
    scales, offsets = np.zeros((len(raw), 8)), np.zeros((len(raw), 8))
    for group in range(8):
        if group < 4:
            scale, offset = raw[:, 4 + group] & 63, raw[:, 8 + group] & 63
        else:
            rest = raw[:, 8 + group]
            scale = rest & 15 | raw[:, group] >> 6 << 4
            offset = rest >> 4 | raw[:, 4 + group] >> 6 << 4
        scales[:, group], offsets[:, group] = scale, offset
    scales, offsets = half(0) * scales, half(2) * offsets
    return scales[:, :, None] * np.arange(K_KINDS[dtype] + 1) - offsets[:, :, None]


@pytest.mark.parametrize("dtype", K_KINDS)
def test_codes_are_the_nearest_of_their_scales_in_float64(dtype):
    values = samples(4)
    blocks = encode_gguf(values, dtype)
    numbers = grid(blocks, dtype)
    shape = len(numbers), numbers.shape[1], -1
    exact = values.astype(np.float64).reshape(shape)
    found = decoded(blocks).reshape(shape)
    nearest = np.abs(exact[..., None] - numbers[:, :, None]).min(-1)
    # Values as near to a tie as float32 rounds may become either neighbor.
    room = 1e-5 * (np.abs(exact) + np.abs(numbers).max(-1, keepdims=True))
    assert (np.abs(found - exact) <= nearest + room).all()


def plain(values, dtype):
    """Without a search: scales of the extreme elements, rounded as they are stored."""
    if dtype == "q6_k":
        groups = values.astype(np.float64).reshape(-1, 16, 16)
        scale = np.abs(groups).max(-1, keepdims=True) / 31
        step = scale.max(1, keepdims=True) / 127
        scale = np.rint(scale / step) * step
        codes = np.clip(np.rint(groups / scale), -32, 31)
        return (codes * scale).reshape(values.shape)
    top = K_KINDS[dtype]
    groups = values.astype(np.float64).reshape(-1, 8, 32)
    low = -np.minimum(groups.min(-1, keepdims=True), 0)
    scale = (groups.max(-1, keepdims=True) + low) / top
    steps = [each.max(1, keepdims=True) / 63 for each in (scale, low)]
    scale, low = (np.rint(x / s) * s for x, s in zip((scale, low), steps, strict=True))
    codes = np.clip(np.rint((groups + low) / scale), 0, top)
    return (codes * scale - low).reshape(values.shape)


@pytest.mark.parametrize("dtype", K_KINDS)
def test_the_search_lowers_the_error(dtype):
    values = weights(5)
    found = np.linalg.norm(decoded(encode_gguf(values, dtype)) - values)
    without = np.linalg.norm(plain(values, dtype) - values)
    assert found < 0.97 * without


@pytest.mark.parametrize("dtype", K_KINDS)
def test_the_relative_error_of_normal_weights(dtype):
    """The step over the square root of 12, from the mean range of 32 normal numbers,
    4.1, or the largest magnitude of 16, 2.0.
    """
    values = weights(6)
    spread = {"q4_k": 4.1 / 15, "q5_k": 4.1 / 31, "q6_k": 2.0 / 32}[dtype]
    found = np.linalg.norm(decoded(encode_gguf(values, dtype)) - values)
    relative = found / np.linalg.norm(values)
    assert 0.8 * spread / 12**0.5 < relative < 1.05 * spread / 12**0.5


@pytest.mark.parametrize("dtype", K_KINDS)
def test_groups_of_one_or_two_numbers(dtype):
    """Scales of the group differ by 6 or 7 bits from the one that would be exact."""
    pairs = [
        (1, 1),
        (-1, -1),
        (0.7, 0.3),
        (-0.5, 1),
        (-1, -0.9),
        (1e-3, 1e-3),
        (9, 9.1),
    ]
    rows = [*(pair * 128 for pair in pairs), [0] * 255 + [1]]
    values = np.array(rows, np.float32)
    found = decoded(encode_gguf(values, dtype))
    step = {"q4_k": 1 / 15, "q5_k": 1 / 31, "q6_k": 1 / 32}[dtype]
    largest = np.abs(values).max(1, keepdims=True)
    assert (np.abs(found - values) <= (0.5 * step + 0.01) * largest).all()


@pytest.mark.parametrize("dtype", ["q4_0", "q5_0", *K_KINDS])
def test_importance_lowers_the_weighted_error(dtype):
    values = weights(7)
    importance = np.exp(np.random.default_rng(8).normal(0, 2, 1024)).astype(np.float32)

    def error(blocks):
        return float((importance * (decoded(blocks) - values) ** 2).sum())

    with_it = error(encode_gguf(values, dtype, importance))
    without = error(encode_gguf(values, dtype))
    assert with_it < 0.93 * without


@pytest.mark.parametrize("dtype", GGUF_ENCODERS)
def test_blocks_that_the_format_holds_stay_as_they_are(dtype):
    """What was decoded is encoded again without another error of its own."""
    first = dequantize(encode_gguf(weights(9), dtype))
    again = dequantize(encode_gguf(first, dtype))
    step = np.abs(first - weights(9)).max()
    assert np.abs(again - first).max() <= 1.1 * step
