"""Products of many rows with plain weights in the TPU simulator."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.linear import Linear
from inl.spec.op import Case
from inl.testing.op_call import OpCall
from inl_jax.pallas import block_sizes, dense
from op_cases import Target
from tpu_simulator import require_right, simulated

SIZES = {"rows": 128, "outputs": 256, "inputs": 256}


def check(backend, monkeypatch, tokens=200, inputs=896, outputs=384):
    """Several blocks along each axis; the last ones of rows and outputs are partial."""
    monkeypatch.setattr(dense, "LEAST_ROWS", 16)
    monkeypatch.setattr(dense, "LEAST_INPUTS", 128)
    monkeypatch.setattr(block_sizes, "searched", lambda *_: SIZES)
    rng = np.random.default_rng(4)
    x, weight = (rng.standard_normal((n, inputs)) for n in (tokens, outputs))
    case = Case("many rows", (x, Linear(weight)), {})
    target = Target(backend, [dense.kernel(simulated())])
    call = OpCall(target, catalog()["linear"], case, "bfloat16")
    require_right(call, "linear/pallas_dense")


def test_products_equal_the_float64_body(tpu_backend, monkeypatch):
    check(tpu_backend, monkeypatch)


def test_a_skipped_block_is_found(tpu_backend, monkeypatch):
    """The last block of inputs is not added."""
    right = dense.body

    def wrong(parts, x, weight, out, sums):
        right(parts - 1, x, weight, out, sums)

    monkeypatch.setattr(dense, "body", wrong)
    with pytest.raises(Exception, match="linear/pallas_dense"):
        check(tpu_backend, monkeypatch, tokens=100)  # not traced before


def test_blocks_of_inputs_are_whole():
    for inputs in (384, 896, 8192, 11008, 14336, 28672):
        blocks = dense.blocks_of(2048, inputs, 4096)
        assert inputs % blocks.inputs == 0
        assert 0 < blocks.inputs <= 2048
    assert dense.blocks_of(700, 14336, 4096).rows == 768


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "reason"),
    [
        (2048, 4096, 14336, "bfloat16", None),
        (64, 4096, 14336, "bfloat16", "1024 rows or more"),
        (2048, 4096, 14336, "float32", "takes bfloat16"),
        (2048, 14336, 4096, "bfloat16", "8192 inputs or more"),
        (2048, 8192, 8192, "bfloat16", "twice the outputs"),
        (2048, 4096, 14300, "bfloat16", "multiples of 128"),
    ],
)
def test_other_products_are_refused(rows, outputs, inputs, dtype, reason):
    x = jax.ShapeDtypeStruct((rows, inputs), dtype)
    w = Linear(jax.ShapeDtypeStruct((outputs, inputs), dtype))
    found = dense.refuse(x, w)
    assert bool(found) == bool(reason)
    assert (reason or "") in (found or "")
