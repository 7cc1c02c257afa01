"""``inl explain --call`` and its functions, against what torch and NumPy ran."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from inl.cli.main import main
from inl.errors import BackendUnavailable, InlError, RequestError
from inl.kernels import explain, explain_call, flash_attention, gemm, layer_norm
from inl.spec.explained import RECORDS

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="torch")
needs_jax = pytest.mark.skipif(not find_spec("jax"), reason="JAX")


def command(capsys, *words):
    code = main(["explain", "--device", "cpu", *words])
    return code, *capsys.readouterr()


@needs_torch
def test_the_command_prints_what_ran_and_why_not_the_others(capsys):
    call = "gemm(bf16[8,16], bf16[16,8], use_bfloat16=True)"
    code, out, err = command(capsys, "--call", call)
    assert code == 0, err
    assert "gemm/torch bfloat16: bfloat16 operands; sums in float32" in out
    assert "aten.mm.default" in out
    code, out, _ = command(capsys, "--json", "--call", call.replace("bf16[8", "f32[8"))
    report = json.loads(out)
    (selection,) = report["selections"]
    assert selection["kernel"] == "gemm/torch"
    assert "rounded to bfloat16" in selection["precision"]
    assert set(selection["refusals"]) == {"gemm/torch bfloat16"}
    assert (report["device"], report["framework"]) == ("cpu:0", "torch")


@needs_torch
@pytest.mark.parametrize(
    ("call", "kernel", "op"),
    [
        (
            'gemm(f32[16,16], f32[16,16], precision="float8_e4m3fn")',
            "gemm/torch float32", "aten.aminmax.default",
        ),
        (
            "flash_attention(f32[1,2,64,8], f32[1,1,64,8], f32[1,1,64,8], causal=True)",
            "attention/torch scaled_dot_product_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
        ),
        (
            "flash_attention(f32[64,8], f32[64,8], f32[64,8], window=9, block_size=16)",
            "attention/torch scaled_dot_product_attention of gathered tiles of 16",
            "aten.index_select.default",
        ),
        (
            "flash_attention(f32[8,8], f32[8,8], f32[8,8], use_flash=False)",
            "attention/torch formula", "aten.exp.default",
        ),
        ("layer_norm(f32[4,8])", "layer_norm/fused of torch",
         "aten.native_layer_norm.default"),
        ("layer_norm(f32[4,8], use_fused_ops=False)", "layer_norm/formula of torch",
         "aten.sqrt.default"),
        (
            f"inl_dynamics({', '.join(['f32[4,8]'] * 6)})",
            "dynamics/torch, fused products", "aten.addcmul.default",
        ),
        ("inl_dynamics_step(f32[4,8], f32[4,8], f32[8], f32[4,24])", "dynamics/torch",
         "aten.sigmoid.default"),
        ('quantized_linear(bf16[32,64], "int4", outputs=32)',
         "quantized_linear/torch, weights decoded by blocks",
         "aten.bitwise_and.Scalar"),
        ('quantized_linear(bf16[8,64], "bf16")', "quantized_linear/torch",
         "aten.mm.default"),
        ("block_sparse_matmul(f32[8,8], f32[1,4,4], [[0, 1]], columns=8)",
         "block_sparse/torch, products of gathered blocks", "aten.mm.default"),
    ],
)  # fmt: skip
def test_what_is_selected_is_what_torch_dispatched(call, kernel, op):
    """The second is seen by torch, which knows nothing of the first."""
    found = explain_call(call, "cpu")
    assert [each.kernel for each in found.selections][-1] == kernel
    assert op in found.launched


@needs_torch
def test_the_selection_of_gpus_is_asked_with_their_devices_refusals(monkeypatch):
    """Tensors say that they are on a GPU; what needs one to compute is replaced."""
    import torch

    from inl_torch.registered import product

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))

    class OnGpu:
        device, ndim, shape = torch.device("cuda"), 2, (16, 16)
        numel = staticmethod(lambda: 256)

    why = product.why_not_float8(OnGpu, OnGpu)
    assert why == "needs compute capability 8.9, found 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert product.why_not_float8(OnGpu, OnGpu) == ""
    OnGpu.shape = 16, 17
    assert "multiples of 16" in product.why_not_float8(OnGpu, OnGpu)


def test_arrays_of_numpy_are_explained_by_the_function():
    x = np.ones((2, 8, 4), np.float32)
    found = explain(flash_attention, x, x, x, causal=True)
    assert found.framework == "numpy"
    assert found.selections[0].kernel == "attention/numpy formula"
    found = explain(gemm, x, x[0].T, block_size=2, use_fp16=True)
    (selection,) = found.selections
    assert dict(selection.refusals) == {
        "gemm of the device": "block_size=2 divides the summed axis"
    }
    assert "layer_norm/formula of numpy" in explain(layer_norm, x).describe()
    assert not RECORDS


@needs_jax
def test_a_program_that_is_compiled_already_is_explained_again():
    import jax.numpy as jnp

    x = jnp.ones((16, 16), jnp.bfloat16)
    for _ in range(2):
        found = explain(gemm, x, x)
        (selection,) = found.selections
        assert selection.kernel == "gemm/jax"
        assert dict(selection.refusals).keys() == {"gemm/xla bfloat16"}
    names = [each.kernel for each in explain(flash_attention, x, x, x).selections]
    assert names == ["attention/xla, tiles of 16"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("gemm(", "such as gemm"),
        ("print(1)", "accepted: gemm"),
        ("gemm(f16[0,4], f16[4,4])", "arrays such as"),
        ("gemm(f16[4,n], f16[4,4])", "arrays such as"),
        ("gemm(f17[4,4], f16[4,4])", "dtype: found 'f17'"),
        ("gemm(f32[99999,99999], f32[4,4])", "elements"),
        ("gemm(f32[4,4], f32[5,4])", "[..., M, K]"),
        ("gemm(f32[4,4], f32[4,4], speed=9)", "speed"),
        ("gemm(f32[4,4], open('x'))", "constants"),
        ('gemm(f32[4,4], f32[4,4], precision="int1")', "accepted: default"),
        ('quantized_linear(f32[4,4], "int1")', "quantized_linear"),
    ],
)
def test_calls_that_cannot_be_read_are_refused(capsys, call, text):
    code, out, err = command(capsys, "--framework", "numpy", "--call", call)
    assert code != 0
    assert not out
    assert text in err
    with pytest.raises(InlError):
        explain_call(call, "cpu", "numpy")


def test_devices_that_are_absent_and_lone_options_are_refused(capsys):
    with pytest.raises(BackendUnavailable, match="tpu:7"):
        explain_call("layer_norm(f32[4,4])", "tpu:7")
    with pytest.raises(RequestError, match="framework"):
        explain_call("layer_norm(f32[4,4])", "cpu", "pandas")
    code, _, err = command(capsys, "--framework", "numpy")
    assert code != 0
    assert "--call" in err
