"""4-bit weights as stored, through ``MatMulNBits``."""

from __future__ import annotations

import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import dequantize
from inl.dtypes import HostArray, wrap
from inl.ops import catalog
from inl.spec.op import Case, Spec
from inl.spec.selection import KernelSelection
from inl.testing.check import CheckFailed
from inl.testing.op_call import OpCall
from inl.testing.op_check import judged, require_passed, run_checked
from inl_onnx import kernels
from inl_onnx.kernels import nbits

SHAPES = {
    "linear": {"weight": (80, 64)},
    "qkv_linear": {"q": (64, 64), "k": (32, 64), "v": (32, 64)},
    "gated_mlp": {"gate": (96, 64), "up": (96, 64), "down": (64, 96)},
}
BIASES = {"linear": ("bias", 80), "qkv_linear": ("k_bias", 32)}


class OnOnnx:
    def __init__(self, backend):
        self.backend, self.selection = backend, KernelSelection(kernels.KERNELS)


def stored(kind, shape, rng):
    """Random blocks of a format, scaled so that rows of results are near 1."""
    header = nbits.HEADERS[kind]
    rows, groups = shape[0], shape[1] // 32
    floats = (
        rng.uniform(0.01, 0.02, (rows, groups, header)) * np.array([1, -8])[:header]
    )
    codes = rng.integers(0, 256, (rows, groups, 16), np.uint8)
    blocks = np.concatenate([floats.astype(np.float16).view(np.uint8), codes], -1)
    return HostArray(blocks.reshape(rows, -1), kind, shape)


def packed_call(target, name, kind, dtype, tokens=5):
    rng = np.random.default_rng(3)
    op = catalog()[name]
    packed = {key: stored(kind, shape, rng) for key, shape in SHAPES[name].items()}
    weights = {key: dequantize(array).astype(float) for key, array in packed.items()}
    if name in BIASES:
        key, size = BIASES[name]
        weights[key] = rng.standard_normal(size)
    attrs = {"activation": "silu"} if name == "gated_mlp" else {}
    case = Case(kind, (rng.standard_normal((tokens, 64)), op.weights(**weights)), attrs)
    return OpCall(target, op, case, dtype, packed), case


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", sorted(nbits.HEADERS))
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_products_are_those_of_the_stored_weights(onnx_backend, name, kind, dtype):
    for tokens in (1, 5, 40):
        call, case = packed_call(OnOnnx(onnx_backend), name, kind, dtype, tokens)
        assert call.choice().kernel.label == f"{name}/nbits"
        require_passed(judged(call, case, run_checked(call, 0)), call, 0)


def test_codes_in_another_order_are_found(onnx_backend, monkeypatch):
    own = nbits.NBits

    def swapped(codes, *rest):
        pairs = onnx_backend.numpy(codes).data
        return own(onnx_backend.tensor(wrap(pairs >> 4 | pairs << 4)), *rest)

    monkeypatch.setattr(nbits, "NBits", swapped)
    call, case = packed_call(OnOnnx(onnx_backend), "linear", "q4_0", "float32")
    with pytest.raises(CheckFailed, match="linear/nbits"):
        require_passed(judged(call, case, run_checked(call, 0)), call, 0)


def test_other_formats_are_refused():
    assert nbits.can_pack(q=Spec((8, 32), "q4_0"), b=Spec((8,), "float32")) is None
    reason = nbits.can_pack(weight=Spec((8, 256), "q4_k"))
    assert reason == "weight is stored as q4_k, not as q4_0, q4_1"


def test_a_program_keeps_packed_weights_and_notices_others(onnx_backend):
    """The weights are constants of the session, and others make another session."""
    rng = np.random.default_rng(1)
    one, other = (
        nbits.packed(stored("q4_1", (64, 32), rng), onnx_backend, "float32")
        for _ in range(2)
    )
    x = onnx_backend.tensor(wrap(np.ones((1, 32), np.float32)))
    run = onnx_backend.runtime.compile(nbits.nbits_product, (), fixed=True)

    def eager(w):
        return onnx_backend.runtime.evaluate(nbits.nbits_product, (x, w), {})

    for w in (one, other, one):
        found, want = (onnx_backend.numpy(y).data for y in (run(x, w), eager(w)))
        assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()
