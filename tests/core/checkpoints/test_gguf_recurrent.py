"""Models with recurrent layers in GGUF files, written by the reference package.

Names, metadata and transformations are those of llama.cpp's converter (``conversion/``
of the source package llama-cpp-python 0.3.36), which llama.cpp's models expect.
"""

from __future__ import annotations

import importlib
from contextlib import closing

import gguf
import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.checkpoints.blocks.dtypes import dequantize
from inl.checkpoints.checkpoint import open_checkpoint
from inl.device import Device
from inl.errors import CheckpointError, WeightMismatch
from inl.spec.limits import Limits
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, local_runner
from random_families import random_family
from stacked_experts import stacked

KEYS, VALUES, DIM, LAYERS, VOCAB = 2, 6, 32, 4, 96
LIMITS = Limits(slots=3, blocks=(12,), block_size=4, max_blocks_per_seq=4, vocab=VOCAB)
CHANGES = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
    "linear_num_key_heads": KEYS, "linear_num_value_heads": VALUES,
    "linear_key_head_dim": DIM, "linear_value_head_dim": DIM, "head_dim": 32,
    "norm_topk_prob": True, "moe_intermediate_size": 32, "rms_norm_eps": 1e-6,
    "shared_expert_intermediate_size": 32, "full_attention_interval": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "qwen3next": ("qwen3_next", gguf.MODEL_ARCH.QWEN3NEXT),
    "qwen35": ("qwen3_5", gguf.MODEL_ARCH.QWEN35),
    "qwen35moe": ("qwen3_5_moe", gguf.MODEL_ARCH.QWEN35MOE),
}


def source(architecture, **changes):
    """The model, its Hugging Face config and its tensors."""
    name, _ = FAMILIES[architecture]
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_family(model, name, **CHANGES | changes)
    tensors = {each: files.tensor(each).data.copy() for each in files.names()}
    return model, dict(files.config), tensors


def split_by_keys(tensor, hf):
    """``in_proj_qkvz`` as the channels of the convolution, and the gates."""
    keys, dim = hf["linear_num_key_heads"], hf["linear_key_head_dim"]
    inner = hf["linear_num_value_heads"] // keys * hf["linear_value_head_dim"]
    heads = tensor.reshape(keys, 2 * dim + 2 * inner, -1)
    parts = np.split(heads, [dim, 2 * dim, 2 * dim + inner], axis=1)
    q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
    return np.concatenate([q, k, v]), z


def tiled(tensor, hf, axis=0):
    """Value heads in the order (number within the key head, key head)."""
    keys, values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    moved = np.moveaxis(tensor, axis, 0)
    grouped = moved.reshape(keys, values // keys, -1, *moved.shape[1:])
    return np.moveaxis(grouped.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def reordered(name, tensor, hf):
    """What files of Qwen3.5 have in place of a recurrent layer's tensor."""
    inner = name.rpartition("linear_attn.")[2]
    if inner in ("in_proj_qkv.weight", "conv1d.weight"):
        channels = 2 * hf["linear_num_key_heads"] * hf["linear_key_head_dim"]
        return np.concatenate([tensor[:channels], tiled(tensor[channels:], hf)])
    if inner == "out_proj.weight":
        return tiled(tensor, hf, axis=1)
    return tensor if inner == "norm.weight" else tiled(tensor, hf)


def converted(architecture, tensors, hf):
    """Tensors by the names of the package's map, as the converter writes them."""
    found = {}
    for name, values in tensors.items():
        if name.endswith("in_proj_qkvz.weight"):
            stem = name.removesuffix("in_proj_qkvz.weight")
            found[f"{stem}in_proj_qkv.weight"], found[f"{stem}in_proj_z.weight"] = (
                split_by_keys(values, hf)
            )
            continue
        if "linear_attn." in name and architecture != "qwen3next":
            values = reordered(name, values, hf)
        if name.endswith("A_log"):
            values = -np.exp(values)
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif "conv1d" in name or "shared_expert_gate" in name:
            values = values.squeeze()
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            values = values + 1
        found[name] = values
    return stacked(found)


def written(path, architecture, hf, tensors, *, kind="F32", drafting=0, change=None):
    _, arch = FAMILIES[architecture]
    names = gguf.get_tensor_name_map(arch, LAYERS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS + drafting)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_value_length(hf["head_dim"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_rope_dimension_count(int(hf["head_dim"] * hf["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(DIM)
    writer.add_ssm_group_count(hf["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(hf["linear_num_value_heads"])
    writer.add_ssm_inner_size(hf["linear_num_value_heads"] * DIM)
    writer.add_full_attention_interval(hf["full_attention_interval"])
    if architecture == "qwen35":
        writer.add_feed_forward_length(hf["intermediate_size"])
    else:
        writer.add_expert_count(hf["num_experts"])
        writer.add_expert_used_count(hf["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(
            hf["shared_expert_intermediate_size"]
        )
    if architecture == "qwen3next":
        writer.add_feed_forward_length(hf["intermediate_size"])
    else:
        writer.add_rope_dimension_sections([4, 2, 2, 0])
    if drafting:
        writer.add_nextn_predict_layers(drafting)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    stored = converted(architecture, tensors, hf)
    if change is not None:
        change(stored)
    for name, values in stored.items():
        packed = kind if values.ndim > 1 and "conv1d" not in name else "F32"
        type_ = gguf.GGMLQuantizationType[packed]
        at = names.get_name(name, (".weight", ".bias"))
        writer.add_tensor(
            at or name, gguf.quantize(values.astype("f4"), type_), raw_dtype=type_
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model, checkpoint):
    backend = ReferenceBackend(Device("reference"), dtype="float64")
    runner = local_runner(backend, model, checkpoint, LIMITS, dtype="float64")
    return prompt_logits(runner, [5, 3, 39, 0, 17, 90, 2])


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("values", [KEYS, VALUES])
def test_logits_match_the_source_model(architecture, values, tmp_path):
    model, hf, tensors = source(architecture, linear_num_value_heads=values)
    path = written(tmp_path / "m.gguf", architecture, hf, tensors)
    with closing(open_checkpoint(path)) as checkpoint:
        found = logits_of(model, checkpoint)
    expected = logits_of(model, MemoryCheckpoint(hf, tensors))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=2e-6)


def test_quantized_matrices_stay_so(tmp_path):
    """Value heads stay in the file's order: no block of ``ssm_out`` is decoded."""
    model, hf, tensors = source("qwen35")
    path = written(tmp_path / "m.gguf", "qwen35", hf, tensors, kind="Q8_0")
    checkpoint = open_checkpoint(path)
    name = "model.layers.0.linear_attn.out_proj.weight"
    assert checkpoint.spec(name) == ("q8_0", tensors[name].shape)
    decoded = tiled(tensors[name], hf, axis=1)
    np.testing.assert_allclose(dequantize(checkpoint.tensor(name)), decoded, atol=0.02)
    expected = logits_of(model, MemoryCheckpoint(hf, tensors))
    error = np.abs(logits_of(model, checkpoint) - expected).max()
    assert 0 < error < 0.1 * np.abs(expected).max()
    checkpoint.close()


def test_layers_that_draft_are_left_out(tmp_path):
    model, hf, tensors = source("qwen35")

    def change(stored):
        stored[f"blk.{LAYERS}.attn_norm.weight"] = np.ones(64)
        stored[f"blk.{LAYERS}.nextn.eh_proj.weight"] = np.ones((64, 128))

    path = written(
        tmp_path / "m.gguf", "qwen35", hf, tensors, drafting=1, change=change
    )
    with closing(open_checkpoint(path)) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == LAYERS
        found = logits_of(model, checkpoint)
    plain = written(tmp_path / "plain.gguf", "qwen35", hf, tensors)
    with closing(open_checkpoint(plain)) as checkpoint:
        assert np.array_equal(logits_of(model, checkpoint), found)
    other = written(tmp_path / "other.gguf", "qwen35", hf, tensors, change=change)
    with (
        closing(open_checkpoint(other)) as checkpoint,
        pytest.raises(WeightMismatch, match=r"unused blk\.4\.nextn"),
    ):
        logits_of(model, checkpoint)


def test_rates_that_grow_are_refused(tmp_path):
    model, hf, tensors = source("qwen35")

    def change(stored):
        stored["model.layers.0.linear_attn.A_log"][1] = 0.5

    path = written(tmp_path / "m.gguf", "qwen35", hf, tensors, change=change)
    message = r"ssm_a.*found a largest number of 0\.5; accepted: numbers below 0"
    with (
        closing(open_checkpoint(path)) as checkpoint,
        pytest.raises(CheckpointError, match=message),
    ):
        logits_of(model, checkpoint)
