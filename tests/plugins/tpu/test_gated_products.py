"""Gate and up projections of many rows in the TPU simulator."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.mlp import GatedMlp
from inl.spec.op import Case
from inl.testing.op_call import OpCall
from inl_jax.pallas import dense, gated
from inl_jax.xla import layers
from op_cases import Target
from tpu_simulator import require_right, simulated


def check(backend, monkeypatch, tokens=80, activation="silu"):
    """Several blocks of rows and outputs, each of several parts; the last are partial.

    The down projection is the Pallas product as well.
    """
    for module, name, value in (
        (gated, "LEAST_ROWS", 16), (gated, "LEAST_INPUTS", 128), (gated, "PART", 16),
        (gated, "INPUT_BYTES", 48 * 2 * 128), (gated, "MATRIX_BYTES", 128 * 2 * 128),
        (dense, "LEAST_ROWS", 16), (dense, "LEAST_INPUTS", 128),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((tokens, 128))
    shapes = {"gate": (384, 128), "up": (384, 128), "down": (128, 384)}
    w = GatedMlp(**{name: rng.standard_normal(s) for name, s in shapes.items()})
    assert gated.blocks_of(tokens, 128, 384) == (48, 128)
    case = Case("many rows", (x, w), {"activation": activation})
    target = Target(backend, [gated.kernel(simulated())])
    call = OpCall(target, catalog()["gated_mlp"], case, "bfloat16")
    require_right(call, "gated_mlp/pallas_dense")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_layers_equal_the_float64_body(tpu_backend, monkeypatch, activation):
    check(tpu_backend, monkeypatch, activation=activation)


def test_an_activation_of_the_wrong_product_is_found(tpu_backend, monkeypatch):
    right = layers.gated_activation

    def wrong(gate, up, *, activation):
        return right(up, gate, activation=activation)

    monkeypatch.setattr(gated.layers, "gated_activation", wrong)
    with pytest.raises(Exception, match="gated_mlp/pallas_dense"):
        check(tpu_backend, monkeypatch, tokens=90)  # not traced before


def test_blocks_fit_in_vmem():
    for inputs in (2048, 4096, 5120, 8192):
        size = gated.blocks_of(4096, inputs, 14336)
        assert size.rows % gated.PART == size.outputs % gated.LANES == 0
        buffers = size.rows * inputs + 2 * size.outputs * inputs
        outputs = size.rows * size.outputs
        assert 2 * 2 * (buffers + outputs) + 8 * outputs <= gated.VMEM_BYTES


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype", "reason"),
    [
        (2048, 4096, 14336, "bfloat16", None),
        (64, 4096, 14336, "bfloat16", "1024 rows or more"),
        (2048, 4096, 14336, "float32", "takes bfloat16"),
        (2048, 576, 1536, "bfloat16", "multiples of 128"),
        (2048, 1024, 4096, "bfloat16", "2048 to 8192 inputs"),
        (2048, 16384, 53248, "bfloat16", "2048 to 8192 inputs"),
    ],
)
def test_other_layers_are_refused(rows, inputs, outputs, dtype, reason):
    x = jax.ShapeDtypeStruct((rows, inputs), dtype)
    wide = jax.ShapeDtypeStruct((outputs, inputs), dtype)
    found = gated.refuse(x, GatedMlp(wide, wide, wide))
    assert bool(found) == bool(reason)
    assert (reason or "") in (found or "")
