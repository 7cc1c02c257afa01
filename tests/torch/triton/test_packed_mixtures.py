"""Mixtures with packed experts against the same blocks in NumPy."""

from __future__ import annotations

from typing import final

import numpy as np
import pytest
import torch
from triton_place import PLACE

from inl.backend.base import PackedKernels, Traits
from inl.backend.host import host_memory
from inl.backend.reference import ReferenceBackend
from inl.config import EngineConfig
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.models import gpt_oss, qwen3_moe
from inl.runners.local_runner import start_runner
from inl.spec.limits import Limits
from inl.spec.tree import leaves
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint
from quantized_blocks import random_blocks
from random_families import random_family

# isort: split
from inl_torch import triton
from inl_torch.backend import TorchBackend
from inl_torch.triton.moe import experts
from inl_torch.triton.quantized import products
from inl_torch.triton.tuning import Tuning

LIMITS = Limits(slots=2, blocks=(8,), block_size=4, max_blocks_per_seq=4, vocab=96)
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32,
    "num_attention_heads": 4, "head_dim": 16,
}  # fmt: skip


@final
class Packing(TorchBackend):
    """Triton kernels; those of packed weights always, or for quantized models."""

    traits = Traits(dtypes=("float32",))

    def __init__(self, *, always=False):
        self.device, self.place = Device("cpu:0"), torch.device(PLACE)
        self.always = always

    def memory(self):
        return host_memory()

    def kernels(self):
        yield from super().kernels()
        yield from triton.kernels(Tuning(processors=1))
        yield from self.packed() if self.always else ()

    def packed(self):
        yield from products.kernels(Tuning(processors=1))
        yield from experts.PACKED_KERNELS

    def offers(self, kind):
        return PackedKernels(self.packed) if kind is PackedKernels else None


def language_of(model, checkpoint):
    return LanguageModel(model, model.config(checkpoint.config), checkpoint)


def compare(language, backend, quantize, seed):
    """Return the layouts of the loaded groups, by op."""
    config = EngineConfig(quantize=quantize, dtype="float32", allow_hosted=True)
    runner = start_runner(language, backend, config, limits=LIMITS)
    plain = ReferenceBackend(Device("reference"), dtype="float64")
    wide = EngineConfig(quantize=quantize, dtype="float64", allow_hosted=True)
    exact = start_runner(language, plain, wide, limits=LIMITS)
    for ids in ([5], [5, 17, 80, 3, 44, 9, 2, 2, 61, 30]):
        found, expected = prompt_logits(runner, ids), prompt_logits(exact, ids)
        size = np.abs(expected).max()
        assert np.abs(found - expected).max() < 2e-5 * size, f"seed {seed}"
    return {group.group.op: group.layout for group in leaves(runner.loaded.groups)}


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_mixture_that_is_quantized_while_it_is_loaded(kind):
    sizes = SIZES | {"moe_intermediate_size": 32, "mlp_only_layers": []}
    checkpoint = random_family(qwen3_moe.MODEL, "qwen3_moe", **sizes)
    language = language_of(qwen3_moe.MODEL, checkpoint)
    layouts = compare(language, Packing(), kind, 0)
    assert layouts["experts"] == layouts["qkv_linear"] == "packed"


def test_gpt_oss_with_experts_in_mxfp4(seed):
    rng = np.random.default_rng(seed)
    plain = random_family(gpt_oss.MODEL, "gpt_oss", **SIZES)
    tensors = {name: plain.tensor(name) for name in plain.names()}
    for name, array in tensors.items():
        if ".experts." in name and name.endswith("weight"):
            tensors[name] = random_blocks(rng, "mxfp4", array.shape)
    checkpoint = MemoryCheckpoint(plain.config, tensors)
    language = language_of(gpt_oss.MODEL, checkpoint)
    layouts = compare(language, Packing(always=True), None, seed)
    assert layouts["expert_linear"] == "packed"
