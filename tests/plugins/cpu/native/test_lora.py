"""The grouped kernel of adapters, compared with the op's body."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import Op, f32, instruction

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.ops import catalog
from inl.spec.dispatch import DynamicOps

CASES = list(catalog()["lora"].cases(np.random.default_rng(7)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lora(native, case):
    base, x, w, selected = case.args
    ops = DynamicOps(ReferenceBackend(Device("reference"), dtype="float64").kernels())
    want = ops.lora(base, x, w, selected, **case.attrs)
    arrays = [f32(each) for each in (base, x, w.a, w.b, selected)]
    y, (rows, width), inner = np.empty(base.shape, np.float32), base.shape, x.shape[1]
    columns, rank = selected.shape[1], case.attrs["rank"]
    dims = rows, width, inner, columns, rank, inner, width
    native.run(instruction(Op.LORA, dims, (*arrays, y)))
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    without = ~selected.any(-1)
    assert np.array_equal(y[without], arrays[0][without])
    alone = np.empty((1, width), np.float32)
    for row in range(rows):
        parts = [arrays[0][row], arrays[1][row], *arrays[2:4], arrays[4][row], alone]
        native.run(instruction(Op.LORA, (1, *dims[1:]), parts))
        assert np.array_equal(alone[0], y[row]), "the same bits in any batch"
