"""Packed layouts of weights give the results of unpacked weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from inl.dtypes import HostArray, cast, wrap
from inl.ops import catalog
from inl.spec.op import Spec
from inl.spec.tolerance import judge, stored
from inl.spec.tree import leaves
from inl.weights.plan import plan_weights
from inl_torch import eager

PACKED = {kernel.op: kernel for kernel in eager.kernels() if kernel.pack}


def host_group(w, dtype):
    return {
        name: None if value is None else cast(value, dtype)
        for name, value in w._asdict().items()
    }


def test_two_composites_are_packed():
    assert sorted(PACKED) == ["gated_mlp", "qkv_linear"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(PACKED))
def test_a_packed_kernel_errs_no_more_than_rounding(
    name, dtype, seed, backend, on_torch, on_host
):
    spec, kernel = catalog()[name], PACKED[name]
    for case in spec.cases(np.random.default_rng(seed)):
        x, _ = on_torch(spec, case, dtype)
        _, w = stored(case, dtype, np.float32)
        packed = kernel.pack(host_group(w, dtype), backend, dtype)
        assert packed.layout == kernel.layout
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves(packed))
        result = on_host(kernel.run(x, packed, **case.attrs))
        verdict = judge(spec, case, dtype, result)
        assert verdict.passed, f"{case.name} in {dtype}, seed {seed}: {verdict}"


@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "kv", ""])
def test_a_missing_bias_counts_as_zeros(given, seed, backend):
    rng = np.random.default_rng(seed)
    group = {name: wrap(rng.standard_normal((4, 6), np.float32)) for name in "qkv"}
    group["q"] = wrap(rng.standard_normal((8, 6), np.float32))
    for name in "qkv":
        size = group[name].shape[0]
        bias = wrap(rng.standard_normal(size, np.float32)) if name in given else None
        group[f"{name}_bias"] = bias
    x = rng.standard_normal((3, 6), np.float32)
    packed = PACKED["qkv_linear"].pack(group, backend, "float32")
    parts = PACKED["qkv_linear"].run(torch.from_numpy(x), packed)
    for name, part in zip("qkv", parts, strict=True):
        want = x.astype(np.float64) @ group[name].data.T.astype(np.float64)
        if group[f"{name}_bias"] is not None:
            want = want + group[f"{name}_bias"].data
        np.testing.assert_allclose(part.numpy(), want, rtol=0, atol=1e-5)


def test_quantized_weights_are_dequantized_like_ggml(seed, backend):
    rng = np.random.default_rng(seed)
    kinds = {
        "gate": ("q8_0", gguf.GGMLQuantizationType.Q8_0),
        "up": ("q4_0", gguf.GGMLQuantizationType.Q4_0),
        "down": ("q4_1", gguf.GGMLQuantizationType.Q4_1),
    }
    group, numbers = {}, {}
    for name, (dtype, kind) in kinds.items():
        packed = gguf.quants.quantize(rng.standard_normal((32, 64), np.float32), kind)
        group[name] = HostArray(packed, dtype, (32, 64))
        numbers[name] = gguf.quants.dequantize(packed, kind)
    held = PACKED["gated_mlp"].pack(group, backend, "float32")
    stacked = np.concatenate([numbers["gate"], numbers["up"]])
    np.testing.assert_array_equal(held.gate_up.numpy(), stacked)
    np.testing.assert_array_equal(held.down.numpy(), numbers["down"])


def test_refusals_to_pack_give_a_reason():
    sizes = {"q": Spec((8, 6), "float32"), "k": Spec((4, 6), "float32")}
    refusal = PACKED["qkv_linear"].can_pack(**sizes, v=Spec((6, 6), "float32"))
    assert refusal == "keys and values of different sizes"
    assert PACKED["qkv_linear"].can_pack(**sizes, v=Spec((4, 6), "float32")) is None


def test_every_layer_of_a_model_is_packed(tiny_llama, backend):
    tiny = tiny_llama(1, bias=True)
    model = tiny.load(backend, "float32")
    layouts = {
        layer.layout for layer in leaves(model.groups) if layer.group.op in PACKED
    }
    assert layouts == {kernel.layout for kernel in PACKED.values()}
    plain = plan_weights(model.model.weights(model.config), (), {})
    assert {layer.layout for layer in leaves(plain)} == {"plain"}
