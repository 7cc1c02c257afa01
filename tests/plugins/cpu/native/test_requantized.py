"""Products of many rows with weights requantized to int8, see REQUANTIZE."""

from __future__ import annotations

import numpy as np
import pytest
from native_blocks import HALVES, random_blocks
from native_harness import (
    Flag,
    Native,
    coded,
    excess,
    f32,
    random_packed,
    weights_of,
)

MODES = {"mode": Flag.X_INT8, "flags": Flag.REQUANTIZE}
LEAST = 64
"""Fewer rows are multiplied as without the flag."""
BLOCK, PART = 256, 64
"""Columns of x, and of weights, that share a scale."""

KINDS = sorted(HALVES)


def rounding_excess(y, x, weights, bias=0):
    """The error relative to the tolerance of a body that rounds x and weights."""
    exact = x.astype(np.float64) @ weights.T + bias
    close = coded(x, BLOCK) @ coded(weights, PART).T + bias
    return excess(y, exact, close, "float32")


@pytest.mark.parametrize("columns", [256, 768])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_rounding_to_int8(native, rng, kind, columns):
    matrix, weights = random_packed(native, rng, kind, 53, columns)
    for rows in (LEAST, 65, 71, 100):
        x = f32(rng.standard_normal((rows, columns)))
        y = native.linear(x, matrix, **MODES)
        assert rounding_excess(y, x, weights) <= 1


@pytest.mark.parametrize("columns", [32, 288, 480])
@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q8_0", "iq4_nl", "mxfp4"])
def test_a_last_block_with_fewer_columns(native, rng, kind, columns):
    matrix, weights = random_packed(native, rng, kind, 40, columns)
    x = f32(rng.standard_normal((70, columns)))
    y = native.linear(x, matrix, **MODES)
    assert rounding_excess(y, x, weights) <= 1


@pytest.mark.parametrize("rows", [1, 12, LEAST - 1])
def test_few_rows_are_not_requantized(native, rng, rows):
    matrix, _ = random_packed(native, rng, "q4_k", 40, 512)
    x = f32(rng.standard_normal((rows, 512)))
    plain = native.linear(x, matrix, mode=Flag.X_INT8)
    assert np.array_equal(native.linear(x, matrix, **MODES), plain)


def test_only_avx512_and_amx_without_tiles_requantize(native, rng):
    matrix, _ = random_packed(native, rng, "q4_k", 40, 512)
    x = f32(rng.standard_normal((LEAST, 512)))
    plain = native.linear(x, matrix, mode=Flag.X_INT8)
    is_same = np.array_equal(native.linear(x, matrix, **MODES), plain)
    assert is_same == (native.isa not in ("avx512", "amx"))


def test_a_row_does_not_depend_on_the_others(native, rng):
    matrix, _ = random_packed(native, rng, "q4_k", 40, 512)
    x = f32(rng.standard_normal((150, 512)))
    x[::7, 5] = 90  # outliers in some rows of a tile
    y = native.linear(x, matrix, **MODES)
    order = rng.permutation(150)
    assert np.array_equal(native.linear(x[order], matrix, **MODES), y[order])
    assert np.array_equal(native.linear(x[:LEAST], matrix, **MODES), y[:LEAST])


def test_results_are_equal_for_any_number_of_threads(lib, native, rng):
    matrix, _ = random_packed(native, rng, "q4_1", 100, 256)
    x = f32(rng.standard_normal((600, 256)))
    want = native.linear(x, matrix, **MODES)
    for threads in (1, 4):
        other = Native(lib, native.isa, threads)
        assert np.array_equal(other.linear(x, matrix, **MODES), want)
        other.close()


def test_many_rows_are_divided_into_chunks(native, rng):
    """More rows than one chunk has, with few and with many tiles of weights."""
    for outputs in (24, 3200):
        matrix, weights = random_packed(native, rng, "q4_0", outputs, 64)
        x = f32(rng.standard_normal((1100, 64)))
        y = native.linear(x, matrix, **MODES)
        assert rounding_excess(y, x, weights) <= 1


@pytest.mark.parametrize(
    ("kind", "columns"), [("q4_0", 512), ("q4_0", 480), ("q6_k", 512)]
)
def test_outliers_are_multiplied_as_float32(native, rng, kind, columns):
    """Beside one that is large, other numbers of a block keep their precision."""
    matrix, weights = random_packed(native, rng, kind, 48, columns)
    rounded = native.linear(np.eye(columns, dtype=np.float32), matrix, **MODES).T
    assert np.abs(rounded - weights).max() <= np.abs(weights).max() / 127
    x = f32(rng.standard_normal((LEAST, columns)))
    outliers = [*rng.choice(256, 2, False), rng.integers(256, columns)]
    small = x.copy()
    small[:, outliers] = 0
    x[:, outliers] = rng.uniform(250, 300, (LEAST, 3)) * rng.choice([-1, 1], 3)
    y = native.linear(x, matrix, **MODES)
    exact = x.astype(np.float64) @ rounded.T
    bound = 3 * np.abs((coded(small, BLOCK) - small) @ rounded.T).max()
    assert np.abs(y - exact).max() <= bound
    assert np.abs(coded(x, BLOCK) @ rounded.T - exact).max() > 3 * bound


@pytest.mark.parametrize("count", [15, 16, 17, 90])
def test_a_list_of_outliers_that_is_full(native, rng, count):
    """More than a list holds make the scale of the block coarser."""
    matrix, weights = random_packed(native, rng, "q4_0", 40, 512)
    x = f32(rng.standard_normal((LEAST, 512)))
    x[:, 256 : 256 + count] = 40 * rng.choice([-1, 1], (LEAST, count))
    y = native.linear(x, matrix, **MODES)
    assert rounding_excess(y, x, weights) <= 1


@pytest.mark.parametrize("outputs", [1, 15, 17, 32, 33, 50])
def test_ragged_outputs_and_a_bias(native, rng, outputs):
    matrix, weights = random_packed(native, rng, "q4_1", outputs, 96)
    x, bias = f32(rng.standard_normal((77, 96))), f32(rng.standard_normal(outputs))
    y = native.linear(x, matrix, bias=bias, **MODES)
    assert rounding_excess(y, x, weights, bias) <= 1


@pytest.mark.parametrize("inner", [16, 40, 96])
def test_gate_and_up_interleaved(native, rng, inner):
    sources = [random_blocks(rng, "q4_1", inner, 64) for _ in range(2)]
    gate, up = (weights_of("q4_1", source, (inner, 64)) for source in sources)
    matrix = native.packing("q4_1", 2 * 16 * -(-inner // 16), 64)
    for index, source in enumerate(sources):
        native.pack("q4_1", source, matrix, first=16 * index, flags=Flag.INTERLEAVE)
    x = f32(rng.standard_normal((75, 64)))
    flags = Flag.GATE_SILU | Flag.REQUANTIZE
    y = native.linear(x, matrix, columns=inner, mode=Flag.X_INT8, flags=flags)

    def body(x, gate, up):
        products = x @ gate.T
        return products / (1 + np.exp(-products)) * (x @ up.T)

    exact = body(x.astype(np.float64), gate, up)
    close = body(coded(x, BLOCK), coded(gate, PART), coded(up, PART))
    assert excess(y, exact, close, "float32") <= 1


def test_addition_and_norm_before_the_product(native, rng):
    matrix, weights = random_packed(native, rng, "q5_0", 48, 160)
    x, delta = f32(rng.standard_normal((2, 80, 160)))
    norm, total = f32(rng.standard_normal(160)), np.empty_like(x)
    y = native.linear(x, matrix, delta=delta, norm=norm, total=total, **MODES)
    assert np.array_equal(total, x + delta)
    both = (x + delta).astype(np.float64)
    normed = both / np.sqrt(np.square(both).mean(1, keepdims=True) + 1e-5) * norm
    assert rounding_excess(y, normed, weights) <= 1


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1e20, 1e30])
def test_extreme_rows(native, rng, size):
    matrix, weights = random_packed(native, rng, "q4_0", 37, 256)
    x = f32(rng.standard_normal((LEAST, 256)) * size)
    y = native.linear(x, matrix, **MODES)
    assert rounding_excess(y, x, weights) <= 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_stays_in_its_row(native, rng, bad):
    matrix, _ = random_packed(native, rng, "q4_k", 37, 512)
    x = f32(rng.standard_normal((LEAST, 512)))
    good = native.linear(x, matrix, **MODES)
    x[20, 300] = bad
    y = native.linear(x, matrix, **MODES)
    assert not np.isfinite(y[20]).any()
    others = np.arange(LEAST) != 20
    assert np.array_equal(y[others], good[others])


def test_an_infinite_scale_of_weights_shows(native, rng):
    source = random_blocks(rng, "q4_0", 20, 512)
    blocks = source.reshape(20, 16, 18)
    blocks[7, 9, :2] = np.array([np.inf], np.float16).view(np.uint8)
    matrix = native.pack("q4_0", blocks.reshape(20, -1))
    y = native.linear(f32(rng.standard_normal((LEAST, 512))), matrix, **MODES)
    assert not np.isfinite(y[:, 7]).any()
    assert np.isfinite(np.delete(y, 7, 1)).all()
