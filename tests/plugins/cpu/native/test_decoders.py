"""Decoding of blocks with any bytes, as a damaged or hostile file has them."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import Flag, Op, f32, i32, instruction, weights_of

from depth import scaled
from inl.checkpoints.blocks.dtypes import BLOCKS
from inl_cpu.abi import KINDS

BLOCK_KINDS = sorted(set(BLOCKS) & set(KINDS))
ROWS, COLUMNS = 18, 512
FILLS = {
    "zeros": lambda rng, shape: np.zeros(shape, np.uint8),
    "ones": lambda rng, shape: np.full(shape, 255, np.uint8),
    "random": lambda rng, shape: rng.integers(0, 256, shape, np.uint8),
    "infinities": lambda rng, shape: np.resize(np.array([0, 124], np.uint8), shape),
}


def source_of(rng, kind, fill):
    elements, size = BLOCKS[kind]
    return FILLS[fill](rng, (ROWS, COLUMNS // elements * size))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_any_bytes_decode_as_the_reference_does(native, rng, kind, fill):
    for _ in range(scaled(1, 10) if fill == "random" else 1):
        source = source_of(rng, kind, fill)
        matrix = native.pack(kind, source)
        ids, y = i32(np.arange(ROWS)), np.empty((ROWS, COLUMNS), np.float32)
        native.run(instruction(Op.EMBEDDING, (ROWS, COLUMNS), (ids, matrix, y), (1.0,)))
        with np.errstate(all="ignore"):
            expected = weights_of(kind, source, (ROWS, COLUMNS)).astype(np.float32)
        finite = np.isfinite(expected)
        assert np.array_equal(y[finite], expected[finite])
        assert not np.isfinite(y[~finite]).any()


@pytest.mark.parametrize("mode", [Flag.X_EXACT, Flag.X_INT8, Flag.X_INT16])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_products_with_any_bytes_end(native, rng, kind, mode):
    """Of activations with infinities, NaN and the largest numbers too."""
    matrix = native.pack(kind, source_of(rng, kind, "random"))
    x = f32(rng.standard_normal((3, COLUMNS)))
    x[1, ::7], x[2, 5] = np.inf, np.nan
    x[2, 6] = np.finfo(np.float32).max
    assert native.linear(x, matrix, mode=mode).shape == (3, ROWS)
