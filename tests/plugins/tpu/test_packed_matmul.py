"""Products with packed weights in the TPU simulator, against the float64 bodies."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import BLOCKS, dequantize
from inl.dtypes import HostArray
from inl.ops import catalog
from inl.spec.op import Case
from inl.testing.op_call import OpCall
from inl.testing.packed_checks import ATTRS, SHAPES
from inl_jax import pallas, xla
from inl_jax.pallas import linear, matmul, packed
from inl_jax.pallas.packed import CODE8
from op_cases import Target
from tpu_simulator import require_right, simulated

LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("q4_0", "q5_0")]
FORMATS = ["q8_0", "q4_1", "q5_1", "float8_e4m3", *LONG]


def stored(rng, dtype, shape):
    """A random matrix of a format, with scales and offsets of float16."""
    elements, size = BLOCKS[dtype]
    data = rng.integers(0, 256, (shape[0], shape[1] // elements * size), np.uint8)
    if size == 1:
        return HostArray(data & 0xBF, dtype, shape)  # below 2, never NaN
    blocks = data.reshape(-1, size)
    halves = 2 if dtype.endswith("1") else 1
    header = rng.uniform(-0.05, 0.05, (len(blocks), halves)).astype(np.float16)
    header[0] = 2.0**-20  # subnormal
    blocks[:, : 2 * halves] = header.view(np.uint8)
    return HostArray(data, dtype, shape)


def check(backend, name, dtype, stored_dtype, tokens=5, shapes=None, seed=1):
    rng = np.random.default_rng(seed)
    spec = catalog()[name]
    shapes = shapes or SHAPES[name]
    arrays = {key: stored(rng, stored_dtype, shape) for key, shape in shapes.items()}
    w = spec.weights(**{k: dequantize(a).astype(np.float64) for k, a in arrays.items()})
    x = rng.standard_normal((tokens, next(iter(shapes.values()))[1]))
    case = Case(stored_dtype, (x, w), ATTRS.get(name, {}))
    kernels = (*xla.KERNELS, *linear.kernels(simulated(seed)))
    call = OpCall(Target(backend, kernels), spec, case, dtype, arrays)
    return require_right(call, f"{name}/pallas")


@pytest.mark.parametrize("stored_dtype", FORMATS)
def test_every_format_equals_its_float64_body(tpu_backend, stored_dtype):
    check(tpu_backend, "linear", "bfloat16", stored_dtype)


@pytest.mark.full
def test_a_chip_that_reads_float8(tpu_backend, monkeypatch):
    monkeypatch.setattr(matmul, "reads_float8", lambda: True)
    check(tpu_backend, "linear", "float32", "float8_e4m3")


def test_every_float8_is_stored(tpu_backend):
    """Subnormals and zeros with a sign, too; NaN is not packed."""
    data = np.arange(256, dtype=np.uint8)
    for bytes_, dtype in ((data, "bfloat16"), (data[data & 0x7F < 0x7F], CODE8)):
        array = HostArray(bytes_[None], "float8_e4m3", (1, len(bytes_)))
        (codes, *_) = packed.pack_matrix(array, tpu_backend, "bfloat16")
        assert codes.dtype == dtype
        scale = packed.CODE8_SCALE if dtype == CODE8 else 1
        found = scale * np.asarray(codes[: len(bytes_), 0], np.float64)
        assert np.array_equal(found, dequantize(array)[0], equal_nan=True)


@pytest.mark.parametrize("name", ["qkv_linear", "gated_mlp"])
def test_other_ops(tpu_backend, name):
    check(tpu_backend, name, "float32", "q8_0")


@pytest.mark.parametrize("tokens", [3, 70])
def test_blocks_of_inputs_rows_and_outputs(tpu_backend, monkeypatch, tokens):
    """Several blocks along each axis, the last one partly outside of the matrix."""

    def small(rows, inputs, outputs, _most):
        assert (inputs, outputs) == (384, 200)
        return matmul.Blocks(32, 128, 128, 3, buffered=rows > 64)

    monkeypatch.setattr(matmul, "blocks_of", small)
    shapes = {"weight": (200, 352)}
    check(tpu_backend, "linear", "float32", "q4_1", tokens, shapes)


def test_a_wrong_scale_is_found(tpu_backend, monkeypatch):
    monkeypatch.setattr(matmul, "from_half", lambda bits: jnp.ones(bits.shape))
    with pytest.raises(Exception, match="linear/pallas"):
        check(tpu_backend, "linear", "bfloat16", "q8_0", shapes={"weight": (72, 64)})


def test_blocks_divide_the_inputs():
    for inputs in (32, 576, 1536, 4096, 11008, 14336, 28672):
        size = packed.padded_inputs(inputs)
        blocks = matmul.blocks_of(512, size, 4096)
        assert size - inputs < packed.PART
        assert blocks.inputs * blocks.parts == size
        assert blocks.inputs <= packed.WHOLE
        assert blocks.inputs % packed.LANES == 0


def test_weights_that_cannot_be_packed_are_refused():
    (first, *_) = [k for k in pallas.kernels() if k.op == "linear"]
    spec = HostArray(np.zeros(0), "q6_k", (0, 256))
    assert "stored as q6_k" in first.can_pack(weight=spec)
    assert "found float16" in first.refuse(HostArray(np.zeros(0), "float16", (0,)))
