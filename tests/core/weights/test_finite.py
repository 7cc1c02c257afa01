"""Detection of NaN and infinity in stored tensors."""

from __future__ import annotations

import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import BLOCK_DTYPES, BLOCKS, dequantize
from inl.dtypes import HostArray, cast
from inl.errors import CheckpointError
from inl.weights.finite import CHUNK, check_finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("at", [0, CHUNK, 2 * CHUNK + 6])
def test_the_first_non_finite_element_is_named(dtype, value, at):
    values = np.full(2 * CHUNK + 7, 1.5)
    check_finite(cast(values, dtype), "w")
    values[at:] = value
    with pytest.raises(CheckpointError, match=rf"^file w: found -?\w+ at \[{at}\]"):
        check_finite(cast(values, dtype), "file w")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_largest_and_smallest_numbers_are_accepted(dtype):
    bits, kind = {
        "float32": (0x7F7FFFFF, np.uint32),
        "float16": (0x7BFF, np.uint16),
        "bfloat16": (0x7F7F, np.uint16),
    }[dtype]
    data = np.array([bits, 1, 0], kind)
    data = data if dtype == "bfloat16" else data.view(dtype)
    check_finite(HostArray(data, dtype, (3,)), "w")


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_random_blocks_are_refused_exactly_if_they_decode_to_non_finite(dtype):
    elements, size = BLOCKS[dtype]
    rng, outcomes = np.random.default_rng(0), []
    for data in rng.integers(0, 256, (300, 2, size)).astype(np.uint8):
        array = HostArray(data, dtype, (2, elements))
        finite = bool(np.isfinite(dequantize(array)).all())
        outcomes.append(finite)
        if finite:
            check_finite(array, "w")
        else:
            with pytest.raises(CheckpointError):
                check_finite(array, "w")
    assert set(outcomes) == {True, False}


def test_integers_and_empty_tensors_are_accepted():
    check_finite(HostArray(np.array([-1, 2**31 - 1], np.int32), "int32", (2,)), "w")
    check_finite(HostArray(np.zeros((0, 4), np.float32), "float32", (0, 4)), "w")
