"""Products with weights of every format, for any number of rows."""

from __future__ import annotations

import numpy as np
import pytest
from native_blocks import HALVES, random_blocks, scale_bytes
from native_harness import (
    Flag,
    Native,
    bf16,
    coded,
    excess,
    f32,
    product_excess,
    random_packed,
    weights_of,
)

from inl.checkpoints.blocks.dtypes import BLOCKS
from inl.dtypes import rounded

KINDS = sorted(HALVES)
ROWS = (1, 2, 3, 5, 7, 12, 13, 16, 29, 40)
PLAIN = ("float32", "float16", "bfloat16")


def plain(native, rng, kind, rows, columns):
    weights = f32(rng.standard_normal((rows, columns)))
    if kind == "float32":
        return native.pack(kind, weights), weights.astype(np.float64)
    if kind == "float16":
        half = weights.astype(np.float16)
        return native.pack(kind, half), half.astype(np.float64)
    bits = (bf16(weights).view(np.uint32) >> 16).astype(np.uint16)
    return native.pack(kind, bits), bf16(weights).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_with_exact_rows(native, rng, kind):
    matrix, weights = random_packed(native, rng, kind, 37, 512)
    for rows in ROWS:
        x = f32(rng.standard_normal((rows, 512)))
        assert product_excess(native.linear(x, matrix), x, weights, "float32") <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_with_int16_rows_are_far_below_the_tolerance(native, rng, kind):
    matrix, weights = random_packed(native, rng, kind, 37, 512)
    for rows in ROWS:
        x = bf16(rng.standard_normal((rows, 512)))
        y = native.linear(x, matrix, mode=Flag.X_INT16)
        assert product_excess(y, x, weights, "bfloat16") < 0.03


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_with_int8_rows(native, rng, kind):
    """Near the tolerance of bfloat16, which is why kernels declare int8: the rounding
    error is up to 1/254 of the largest number of a group."""
    matrix, weights = random_packed(native, rng, kind, 37, 512)
    for rows in ROWS:
        x = bf16(rng.standard_normal((rows, 512)))
        y = native.linear(x, matrix, mode=Flag.X_INT8)
        assert product_excess(y, x, weights, "bfloat16") < 3


@pytest.mark.parametrize(("kind", "group"), [("q4_1", 32), ("q6_k", 16), ("q8_0", 32)])
def test_int8_rows_have_no_other_error(native, rng, kind, group):
    """With inputs that int8 represents exactly, the error is that of float32."""
    matrix, weights = random_packed(native, rng, kind, 64, 512)
    # Integers, whose codes are exact.
    x = f32(rng.integers(-127, 128, (9, 512)))
    x[:, ::group] = 127
    y = native.linear(x, matrix, mode=Flag.X_INT8)
    assert np.array_equal(coded(x, group), x)
    assert product_excess(y, x, weights, "float32") <= 1


@pytest.mark.parametrize("mode", [Flag.X_INT8, Flag.X_INT16])
@pytest.mark.parametrize("fill", [0, 255])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_codes_do_not_overflow(native, rng, kind, fill, mode):
    """All codes and all inputs have the largest magnitude that they can have."""
    source = random_blocks(rng, kind, 16, 512)
    elements, size = BLOCKS[kind]
    blocks = source.reshape(16, 512 // elements, size)
    filled = np.full_like(blocks, fill)
    kept = list(scale_bytes(kind))
    filled[:, :, kept] = blocks[:, :, kept]
    source = filled.reshape(16, -1)
    matrix, weights = native.pack(kind, source), weights_of(kind, source, (16, 512))
    for rows in (1, 2, 12):
        x = f32(np.ones((rows, 512)))
        x[rows // 2 :] *= -1
        y = native.linear(x, matrix, mode=mode)
        assert product_excess(y, x, weights, "float32") <= 1


@pytest.mark.parametrize("columns", [1, 2, 5, 31, 64, 577])
@pytest.mark.parametrize("kind", PLAIN)
def test_plain_weights(native, rng, kind, columns):
    matrix, weights = plain(native, rng, kind, 37, columns)
    for rows in ROWS:
        x = f32(rng.standard_normal((rows, columns)))
        assert product_excess(native.linear(x, matrix), x, weights, "float32") <= 1


@pytest.mark.parametrize("columns", [1, 2, 5, 31, 64, 577])
def test_narrow_weights_with_narrow_rows(native, rng, columns):
    matrix, weights = plain(native, rng, "bfloat16", 37, columns)
    for rows in ROWS:
        x = bf16(rng.standard_normal((rows, columns)))
        y = native.linear(x, matrix, mode=Flag.X_BF16)
        assert product_excess(y, x, weights, "bfloat16") <= 1


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 50, 333])
def test_ragged_outputs_and_a_bias(native, rng, outputs):
    matrix, weights = random_packed(native, rng, "q4_1", outputs, 96)
    x, bias = f32(rng.standard_normal((7, 96))), f32(rng.standard_normal(outputs))
    y = native.linear(x, matrix, bias=bias)
    assert product_excess(y, x, weights, "float32", bias) <= 1


@pytest.mark.parametrize(
    ("mode", "size"),
    [(Flag.X_EXACT, size) for size in (1e-38, 1e-30, 1e-20, 1e20, 1e30)]
    + [(Flag.X_INT16, size) for size in (1e-30, 1e-20, 1e20, 1e30)],
)
def test_extreme_rows(native, rng, size, mode):
    matrix, weights = random_packed(native, rng, "q4_1", 37, 256)
    dtype = "float32" if mode == Flag.X_EXACT else "bfloat16"
    x = rounded(f32(size * rng.standard_normal((13, 256))), dtype)
    y = native.linear(x, matrix, mode=mode)
    # Results near the smallest float32 lose digits in any float32 arithmetic.
    lost = 256 * 2.0**-149
    exact = x.astype(np.float64) @ weights.T
    off = np.abs(y - exact) <= lost
    assert off.all() or product_excess(y, x, weights, dtype) <= 1


@pytest.mark.parametrize("mode", [Flag.X_EXACT, Flag.X_INT8, Flag.X_INT16])
def test_denormal_rows_and_zeros(native, rng, mode):
    matrix, weights = random_packed(native, rng, "q4_0", 37, 64)
    x = f32(1e-41 * rng.standard_normal((3, 64)))
    x[1] = 0
    y = native.linear(x, matrix, mode=mode)
    # The scale of integers is smaller than what it scales, and may underflow.
    bound = 1e-43 if mode == Flag.X_EXACT else 1e-40
    assert np.abs(y - x.astype(np.float64) @ weights.T).max() < bound
    assert (y[1] == 0).all()


@pytest.mark.parametrize("scale", [6e-8, 1000.0])
def test_scales_at_the_limits_of_float16(native, rng, scale):
    matrix, weights = random_packed(native, rng, "q4_1", 37, 256, size=scale)
    x = f32(rng.standard_normal((5, 256)))
    assert product_excess(native.linear(x, matrix), x, weights, "float32") <= 1


@pytest.mark.parametrize("mode", [Flag.X_EXACT, Flag.X_INT8, Flag.X_INT16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_inputs_propagate(native, rng, mode, value):
    matrix, _ = random_packed(native, rng, "q4_1", 37, 64)
    x = f32(rng.standard_normal((3, 64)))
    x[1, 40] = value
    y = native.linear(x, matrix, mode=mode)
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("mode", [Flag.X_EXACT, Flag.X_INT8, Flag.X_INT16])
def test_results_of_a_row_are_independent_of_the_batch(native, rng, mode):
    matrix, _ = random_packed(native, rng, "q4_1", 96, 288)
    x = f32(rng.standard_normal((40, 288)))
    together = native.linear(x, matrix, mode=mode)
    for rows in range(1, 40):
        alone = native.linear(x[:rows].copy(), matrix, mode=mode)
        assert np.array_equal(alone, together[:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_many_int8_rows_get_the_bits_of_one(native, rng, kind):
    """Weights may be decoded once for many rows; some groups have outliers."""
    matrix, _ = random_packed(native, rng, kind, 53, 512)
    x, bias = f32(rng.standard_normal((109, 512))), f32(rng.standard_normal(53))
    x[::5, 7] = 60.0

    def product(rows):
        return native.linear(rows.copy(), matrix, bias=bias, mode=Flag.X_INT8)

    alone = np.concatenate([product(x[row : row + 1]) for row in range(109)])
    for rows in (8, 11, 12, 13, 23, 24, 31, 96, 97, 98, 109):
        assert np.array_equal(product(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kind", ["q4_1", "q5_0", "q6_k", "q8_0"])
def test_many_gated_int8_rows_get_the_bits_of_one(native, rng, kind):
    matrix, _ = random_packed(native, rng, kind, 96, 256)
    x = f32(rng.standard_normal((31, 256)))

    def product(rows):
        flags = {"mode": Flag.X_INT8, "flags": Flag.GATE_SILU}
        return native.linear(rows.copy(), matrix, columns=41, **flags)

    alone = np.concatenate([product(x[row : row + 1]) for row in range(31)])
    assert np.array_equal(product(x), alone)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q4_1", "q6_k"])
@pytest.mark.parametrize("rows", [1, 4, 5, 40, 200])
def test_results_are_equal_for_any_number_of_threads(lib, native, rng, kind, rows):
    make = plain if kind in PLAIN else random_packed
    matrix, _ = make(native, rng, kind, 640, 512)
    x = f32(rng.standard_normal((rows, 512)))
    want = native.linear(x, matrix)
    for threads in (1, 3, 4):
        other = Native(lib, native.isa, threads)
        assert np.array_equal(other.linear(x, matrix), want)
        other.close()


MANY = (31, 32, 33, 48, 70, 513)


@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
@pytest.mark.parametrize("columns", [256, 768])
def test_many_rows_batch_variant(native, rng, kind, columns):
    """The prefill mode; AMX also rounds the weights to bfloat16."""
    make = plain if kind in PLAIN else random_packed
    matrix, weights = make(native, rng, kind, 53, columns)
    mode = Flag.X_BF16 if kind in PLAIN else Flag.X_INT16
    for rows in MANY:
        x = bf16(rng.standard_normal((rows, columns)))
        y = native.linear(x, matrix, mode=mode, flags=Flag.BATCH_VARIANT)
        assert product_excess(y, x, weights, "bfloat16") <= 1


@pytest.mark.parametrize("columns", [1, 31, 33, 50])
def test_many_rows_of_ragged_width(native, rng, columns):
    matrix, weights = plain(native, rng, "bfloat16", 53, columns)
    for rows in MANY:
        x = bf16(rng.standard_normal((rows, columns)))
        y = native.linear(x, matrix, mode=Flag.X_BF16, flags=Flag.BATCH_VARIANT)
        assert product_excess(y, x, weights, "bfloat16") <= 1


def test_batch_variant_results_are_equal_for_any_number_of_threads(lib, native, rng):
    matrix, _ = random_packed(native, rng, "q4_1", 100, 256)
    x = f32(rng.standard_normal((600, 256)))
    modes = {"mode": Flag.X_INT8, "flags": Flag.BATCH_VARIANT}
    want = native.linear(x, matrix, **modes)
    for threads in (1, 4):
        other = Native(lib, native.isa, threads)
        assert np.array_equal(other.linear(x, matrix, **modes), want)
        other.close()


def normalized(x, weight, eps):
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("plus_one", [False, True])
def test_addition_and_norm_before_the_product(native, rng, rows, plus_one):
    matrix, weights = random_packed(native, rng, "q8_0", 48, 160)
    x, delta = f32(rng.standard_normal((2, rows, 160)))
    norm, total = f32(rng.standard_normal(160)), np.empty_like(x)
    flags = Flag.PLUS_ONE if plus_one else 0
    y = native.linear(x, matrix, delta=delta, norm=norm, total=total, flags=flags)
    assert np.array_equal(total, x + delta)

    def body(kind):
        weight = norm.astype(kind) + plus_one
        return normalized(x.astype(kind) + delta, weight, 1e-5) @ weights.T.astype(kind)

    assert excess(y, body(np.float64), body(np.float32), "float32") <= 1
    plain_norm = native.linear(x + delta, matrix, norm=norm, flags=flags)
    assert np.array_equal(plain_norm, y)
    modes = {"mode": Flag.X_INT16, "flags": flags | Flag.BATCH_VARIANT}
    near = native.linear(x, matrix, delta=delta, norm=norm, total=total, **modes)
    assert np.array_equal(total, x + delta)
    assert np.abs(near - y).max() < 0.01 * np.abs(y).max()


@pytest.mark.parametrize("inner", [16, 40, 96])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_interleaved(native, rng, inner, activation):
    """Gate and up interleaved by 16 rows, also for widths that 16 does not divide."""
    sources = [random_blocks(rng, "q4_1", inner, 64) for _ in range(2)]
    gate, up = (weights_of("q4_1", source, (inner, 64)) for source in sources)
    matrix = native.packing("q4_1", 2 * 16 * -(-inner // 16), 64)
    for index, source in enumerate(sources):
        native.pack("q4_1", source, matrix, first=16 * index, flags=Flag.INTERLEAVE)
    flag = Flag.GATE_SILU if activation == "silu" else Flag.GATE_GELU

    def body(x):
        from inl.ops.mlp import gated_activation

        parts = (x @ w.T.astype(x.dtype) for w in (gate, up))
        return gated_activation.body(*parts, activation=activation)

    for rows in (1, 4, 13, 50):
        x = f32(rng.standard_normal((rows, 64)))
        y = native.linear(x, matrix, flags=flag, columns=inner)
        assert excess(y, body(x.astype(np.float64)), body(x), "float32") <= 1
        modes = {"mode": Flag.X_INT16, "flags": flag | Flag.BATCH_VARIANT}
        near = native.linear(x, matrix, columns=inner, **modes)
        assert np.abs(near - y).max() < 0.01 * np.abs(y).max()


def test_stacked_sources(native, rng):
    """Queries, keys and values that end within a tile."""
    sizes = (40, 24, 24)
    sources = [random_blocks(rng, "q6_k", rows, 256) for rows in sizes]
    matrix = native.packing("q6_k", sum(sizes), 256)
    first = 0
    for source in sources:
        native.pack("q6_k", source, matrix, first=first)
        first += len(source)
    together = np.concatenate(sources)
    x = f32(rng.standard_normal((3, 256)))
    y = native.linear(x, matrix)
    assert product_excess(y, x, weights_of("q6_k", together, (88, 256)), "float32") <= 1
