"""Checkpoints that torchao itself quantizes and flattens, where it is installed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.quantized.checkpoint import quantized

torch = pytest.importorskip("torch")
torchao = pytest.importorskip("torchao")
safetensors = pytest.importorskip("safetensors.torch")
BOUND = 1e-3


def configs():
    """Those that torchao can make on a CPU."""
    from torchao import quantization as ao

    group = ao.PerGroup(32)
    return {
        "int8": ao.Int8WeightOnlyConfig(),
        "int8 groups": ao.Int8WeightOnlyConfig(granularity=group),
        "int8 tensor": ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
        "int8 inputs": ao.Int8DynamicActivationInt8WeightConfig(),
        "int4": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int4 zeros": ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=group,
            mapping_type=ao.MappingType.ASYMMETRIC,
        ),
        "int3": ao.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=group),
        "int4, int8 inputs": ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=group
        ),
        "float8": ao.Float8WeightOnlyConfig(),
    }  # fmt: skip


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("name", configs())
def test_values_are_those_of_torchao(name, rounded, tmp_path):
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
    )

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(128, 64))
    torchao.quantization.quantize_(module, configs()[name])
    tensors, metadata = flatten_tensor_state_dict(module.state_dict())
    safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata)
    kind = type(configs()[name]).__name__
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind}}}
    text = json.dumps({"quantization_config": config})
    (tmp_path / "config.json").write_text(text)
    checkpoint = quantized(open_checkpoint(tmp_path))
    assert f"torchao {kind}: 1 matrices" in checkpoint.notes[0]
    if rounded:
        checkpoint = checkpoint.rounded("float32")
    expected = module[0].weight.dequantize().numpy()
    found = dequantize(checkpoint.tensor("0.weight"))
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < (BOUND if rounded else 1e-6)
