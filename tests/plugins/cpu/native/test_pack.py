"""Packing is lossless: unpacked rows equal the core's decoder bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native_blocks import HALVES, random_blocks
from native_harness import Native, Op, bf16, f32, i32, instruction, weights_of

from inl_cpu.abi import KINDS as ABI_KINDS
from inl_cpu.abi import MatrixStruct

KINDS = sorted(HALVES)


def rows_of(native, matrix):
    """The matrix as float32, read by EMBEDDING."""
    rows, columns = matrix.struct.rows, matrix.struct.columns
    ids, y = i32(np.arange(rows)), np.empty((rows, columns), np.float32)
    native.run(instruction(Op.EMBEDDING, (rows, columns), (ids, matrix, y), (1.0,)))
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_packed_kinds_are_lossless(native, rng, kind, rows):
    source = random_blocks(rng, kind, rows, 512)
    expected = weights_of(kind, source, (rows, 512)).astype(np.float32)
    assert np.array_equal(rows_of(native, native.pack(kind, source)), expected)


@pytest.mark.parametrize("columns", [1, 6, 33])
def test_plain_kinds_are_lossless(native, rng, columns):
    weights = bf16(rng.standard_normal((21, columns)))
    bits = (weights.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(rows_of(native, native.pack("bfloat16", bits)), weights)
    half = weights.astype(np.float16)
    actual = rows_of(native, native.pack("float16", half))
    assert np.array_equal(actual, half.astype(np.float32))


def test_every_float16_is_converted_exactly(native):
    every = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    actual = rows_of(native, native.pack("float16", every))
    # On ARM, NumPy warns of signaling NaNs.
    with np.errstate(invalid="ignore"):
        expected = every.view(np.float16).astype(np.float32)
    assert np.array_equal(actual, expected, equal_nan=True)


def test_float32_packs_into_bfloat16(native, rng):
    weights = f32(rng.standard_normal((18, 40)))
    matrix = native.pack("float32", weights, native.packing("bfloat16", 18, 40))
    assert np.array_equal(rows_of(native, matrix), bf16(weights))


def test_ids_out_of_range_give_zeros(native, rng):
    matrix = native.pack("float32", f32(rng.standard_normal((5, 8))))
    ids, y = i32([-1, 5, 2**31 - 1]), np.ones((3, 8), np.float32)
    native.run(instruction(Op.EMBEDDING, (3, 8), (ids, matrix, y), (1.0,)))
    assert not y.any()


def test_threads_write_disjoint_bytes(lib, native, rng):
    """Rows of one tile share no byte, even if a source begins within a tile."""
    source = random_blocks(rng, "q4_0", 200, 256)
    expected = weights_of("q4_0", source, (200, 256)).astype(np.float32)
    several = Native(lib, native.isa, 4)
    for first in (0, 5):
        matrix = several.packing("q4_0", 205, 256)
        several.pack("q4_0", source, matrix, first=first)
        assert np.array_equal(rows_of(several, matrix)[first : first + 200], expected)
    several.close()


LARGEST_RATIO = 1.03
"""Packed bytes by those of the source."""

LOOKED_UP = {
    "tq1_0": 1.23,
    "iq1_s": 2.12,
    "iq1_m": 2.04,
    "iq2_xxs": 1.61,
    "iq2_xs": 1.55,
    "iq2_s": 1.4,
    "iq3_xxs": 1.41,
    "iq3_s": 1.26,
}
"""The same of kinds of which a code stands for several values, which are looked up when
they are packed."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_is_as_small_as_its_source(lib, kind):
    struct = MatrixStruct(rows=64, columns=1024)
    assert lib.inl_packing(ABI_KINDS[kind], ctypes.byref(struct)) == 0
    source = 64 * lib.inl_source_bytes(ABI_KINDS[kind], 1024)
    ratio = lib.inl_matrix_bytes(ctypes.byref(struct)) / source
    assert 1 <= ratio <= LOOKED_UP.get(kind, LARGEST_RATIO)
