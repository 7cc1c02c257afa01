"""Quantization of every family: logits equal those of a model with decoded weights."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from inl import EngineConfig
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.executor.model_loader import LanguageModel
from inl.plugin.builtin import FAMILIES
from inl.runners.local_runner import start_runner
from inl.spec.message import admit_frame
from inl.testing.play import one_step
from inl.testing.tiny import MemoryCheckpoint
from quantized_blocks import decoded

NAMES = sorted({module for _, _, module in FAMILIES})
WIDE = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
"""Rows of whole blocks."""
LATENT = {"head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32, "num_key_value_heads": 4}
CHANGES = {
    "deepseek_v2": LATENT, "deepseek_v3": LATENT, "glm4_moe_lite": LATENT,
    "deepseek_v32": LATENT, "glm_moe_dsa": LATENT, "youtu": LATENT,
    "minicpm3": LATENT, "axk1": LATENT,
    "phi3": {"head_dim": 8}, "bamba": {"mamba_n_heads": 8},
    "granite_hybrid": {"mamba_n_heads": 8},
}  # fmt: skip
IDS = [3, 17, 60, 2, 41, 41, 9, 77, 5, 30]
KEPT = (
    "norm",
    "embed_tokens",
    "lm_head",
    "router",
    ".gate.weight",
    "shared_expert_gate",
)
"""Parts of the names of tensors that must stay as they are."""


def language_of(model, files):
    return LanguageModel(model, model.config(files.config), files)


def logits(language):
    config = EngineConfig(
        backend="reference", dtype="float64", max_batch=4, context=32, sampling="greedy"
    )
    backend = ReferenceBackend(Device("reference"), dtype="float64")
    runner = start_runner(language, backend, config)
    limits = runner.limits
    frame = admit_frame(
        1, [[1, 2]] * limits.groups, groups=limits.groups,
        max_blocks_per_seq=limits.max_blocks_per_seq,
    )  # fmt: skip
    runner.submit(frame)
    found = runner.logits(one_step(limits, [(1, IDS)], step=0, decoding=0)).data[0]
    runner.close()
    return np.array(found)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_decoded_weights(name, random_checkpoint):
    """int8 times a float16 scale is exact in float32."""
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_checkpoint(model, name, **WIDE | CHANGES.get(name, {}))
    quantized = language_of(model, files).quantized("int8")
    tensors, names = {}, []
    for each in files.names():
        array = quantized.checkpoint.tensor(each)
        if array.dtype == "q8_0":
            names.append(each)
            tensors[each] = decoded(array)
        else:
            tensors[each] = files.tensor(each)
    assert any(each.endswith("o_proj.weight") for each in names)
    assert not [each for each in names if any(part in each for part in KEPT)]
    found = logits(quantized)
    wanted = logits(language_of(model, MemoryCheckpoint(files.config, tensors)))
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-8)
    assert np.abs(logits(language_of(model, files)) - wanted).max() > 1e-4
