"""Quantized linear layers against formats of their own, and fusion reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl.optimizers import apply_kernel_fusion, quantize_for_inference
from inl_toolkit.optimizers.quantize import FORMATS
from inl_torch.registered import quantized

BOUNDS = {"bf16": 2**-8, "fp16": 2**-11, "fp8": 0.04, "int8": 0.01, "int4": 0.11}
"""Relative error of normal weights, at most."""
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(70, 96), torch.nn.ReLU(), torch.nn.Linear(96, 5, bias=False)
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_formats(dtype):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = quantize_for_inference(model, dtype)
    x = torch.randn(7, 70)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert [layer.name for layer in found.quantization.layers] == ["0", "2"]
    for layer, index in zip(found.quantization.layers, (0, 2), strict=True):
        exact = model[index].weight.detach()
        weight = found[index].weight(torch.float64)
        error = float((weight - exact).norm() / exact.double().norm())
        assert layer.error == pytest.approx(error, rel=1e-4)
        assert 0 < error < BOUNDS[dtype]
        stored = found[index].packed
        padded = -(-exact.shape[1] // 32) * 32 if dtype == "int4" else exact.shape[1]
        bits = 8 * stored.numel() * stored.element_size()
        assert bits == exact.shape[0] * padded * BITS[dtype]
    assert found.quantization.error == max(e.error for e in found.quantization.layers)
    off = (found(x) - model(x)).norm() / model(x).norm()
    assert off < 3 * BOUNDS[dtype]


UNITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float64: 2**-24}
"""Rounding of an input dtype, or of the float32 in which weights are widened."""


@pytest.mark.parametrize("kind", UNITS, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_inputs_of_other_widths_beside_a_bias(dtype, kind):
    torch.manual_seed(1)
    layer = torch.nn.Linear(70, 96)
    (found,) = quantize_for_inference(layer, dtype)
    x = torch.randn(7, 70).to(kind)
    y = found(x)
    assert y.dtype == kind
    wide, weight = x.double(), found.weight(torch.float64)
    exact = wide @ weight.T + layer.bias.detach().double()
    # Of each weight, of the bias and of the result.
    size = wide.abs() @ weight.abs().T + layer.bias.detach().abs()
    assert float(((y.double() - exact).abs() / size).max()) < 2 * UNITS[kind]


@pytest.mark.parametrize("kind", [*UNITS, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 16, 17])
@pytest.mark.parametrize("dtype", FORMATS)
def test_weights_are_decoded_in_blocks(dtype, rows, kind, monkeypatch):
    monkeypatch.setattr(quantized, "BLOCK", 1)
    torch.manual_seed(4)
    (found,) = quantize_for_inference(torch.nn.Linear(96, 70), dtype)
    assert len(found.packed) > 2 * quantized.PAIR
    x = torch.randn(rows, 96).to(kind)
    y, weight = found(x), found.weight(torch.float64)
    exact = x.double() @ weight.T + found.bias
    size = x.double().abs() @ weight.abs().T + found.bias.abs()
    assert y.shape == (rows, 70)
    assert bool(
        ((y.double() - exact).abs() <= 2 * UNITS.get(kind, 2**-22) * size).all()
    )


def test_every_number_of_float8_is_decoded():
    bits = torch.arange(256).to(torch.uint8)
    finite = bits[bits % 128 != 127]
    stored = finite.view(torch.float8_e4m3fn)[None]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(quantized.codes(stored, dtype), stored.to(dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_conversion_of_the_model_leaves_the_stored_weights(dtype):
    # Scales of these weights are below the normal numbers of float16.
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(70, 96), torch.nn.LayerNorm(96))
    model[0].weight.data *= 1e-4
    found = quantize_for_inference(model, dtype)
    weight, stored = found[0].weight(torch.float64), found[0].nbytes
    for convert in ("half", "double", "bfloat16"):
        getattr(found, convert)()
        assert found[1].weight.dtype == getattr(torch, {"half": "float16",
            "double": "float64"}.get(convert, convert))  # fmt: skip
        assert torch.equal(found[0].weight(torch.float64), weight)
        assert found[0].nbytes == stored
    assert found(torch.randn(3, 70).bfloat16()).dtype == torch.bfloat16
    assert found.to("meta")[0].packed.device.type == "meta"


def test_int8_rounds_to_the_nearest_step():
    weight = torch.tensor([[127.0, 0.4, -0.6, -126.5]])
    layer = torch.nn.Linear(4, 1, bias=False)
    layer.weight.data = weight
    found = quantize_for_inference(layer, "int8")[0]
    assert found.packed.tolist() == [[127, 0, -1, -126]]
    assert np.allclose(found.weight(torch.float32), [[127, 0, -1, -126]])


# torch imports deprecated parts of itself to compile.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_fusion_reports_what_it_did():
    model = network()
    for strategy, why in (
        ("triton", "needs an NVIDIA GPU: "),
        ("onednn", "nothing to apply"),
        ("xla", "functions of JAX arrays"),
    ):
        if strategy == "triton" and torch.cuda.is_available():
            continue
        found = apply_kernel_fusion(model, strategy)
        assert found is model
        assert found.fusion.fused == ()
        assert why in found.fusion.why_not
    compiled = apply_kernel_fusion(model, "compile")
    assert compiled.fusion.fused == ("Sequential",)
    assert isinstance(compiled, torch._dynamo.OptimizedModule)
