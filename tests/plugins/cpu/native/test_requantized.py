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
BLOCK = 256

KINDS = sorted(HALVES)


def rounding_excess(y, x, weights, bias=0):
    """The error relative to the tolerance of a body that rounds x and weights."""
    exact = x.astype(np.float64) @ weights.T + bias
    close = coded(x, BLOCK) @ coded(weights, BLOCK).T + bias
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


def test_only_avx512_requantizes(native, rng):
    matrix, _ = random_packed(native, rng, "q4_k", 40, 512)
    x = f32(rng.standard_normal((LEAST, 512)))
    plain = native.linear(x, matrix, mode=Flag.X_INT8)
    is_same = np.array_equal(native.linear(x, matrix, **MODES), plain)
    assert is_same == (native.isa != "avx512")


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


@pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
def test_outliers_do_not_cost_precision(native, rng, kind):
    """Other numbers of a block keep their precision beside one that is large."""
    matrix, weights = random_packed(native, rng, kind, 48, 512)
    x = f32(rng.standard_normal((LEAST, 512)))
    x[:, 100] *= 300
    y = native.linear(x, matrix, **MODES)
    # Without the column of outliers, as if they were exact.
    small, at = x.copy(), weights.copy()
    small[:, 100] = 0
    large = f32(np.outer(x[:, 100], weights[:, 100]))
    exact = small.astype(np.float64) @ at.T
    close = coded(small, BLOCK) @ coded(at, BLOCK).T
    # The weights of the column are rounded too.
    share = np.abs(coded(at, BLOCK)[:, 100] - at[:, 100]).max()
    noise = np.abs(close - exact).max() * 3 + share * np.abs(x[:, 100]).max() * 2
    assert np.abs(y - large - exact).max() <= noise
    # A scale for 256 columns without a second plane is coarser.
    coarse = coded(x, BLOCK) @ coded(weights, BLOCK).T
    assert np.abs(coarse - (exact + large)).max() > 4 * np.abs(close - exact).max()


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
    close = body(coded(x, BLOCK), coded(gate, BLOCK), coded(up, BLOCK))
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
