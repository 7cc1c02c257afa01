"""LFM2 in GGUF files, written by the reference package.

Names, metadata and transformations are those of llama.cpp's converter.
"""

from __future__ import annotations

import importlib
import re
from contextlib import closing

import gguf
import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.checkpoints.checkpoint import open_checkpoint
from inl.device import Device
from inl.errors import CheckpointError
from inl.spec.limits import Limits
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, local_runner
from random_families import random_family
from stacked_experts import stacked

LAYERS, VOCAB = 4, 96
LIMITS = Limits(slots=3, blocks=(12,), block_size=4, max_blocks_per_seq=4, vocab=VOCAB)
CHANGES = {"tie_word_embeddings": True, "block_auto_adjust_ff_dim": False}
FAMILIES = {
    "lfm2": ("lfm2", gguf.MODEL_ARCH.LFM2),
    "lfm2moe": ("lfm2_moe", gguf.MODEL_ARCH.LFM2MOE),
}
PUBLISHED = {
    r"^model\.norm\.": "model.embedding_norm.",
    r"\.input_layernorm\.": ".operator_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.self_attn\.o_proj\.": ".self_attn.out_proj.",
    r"\.self_attn\.([qk])_norm\.": r".self_attn.\1_layernorm.",
    r"\.mlp\.gate\.e_score_correction_bias$": ".feed_forward.expert_bias.bias",
    r"\.mlp\.experts\.(gate|up|down)_proj": r".feed_forward.experts.\1_proj",
    r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
    r"\.mlp\.down_proj\.": ".feed_forward.w2.",
    r"\.mlp\.up_proj\.": ".feed_forward.w3.",
    r"\.mlp\.": ".feed_forward.",
}
"""Parts of our names, and what published files have, which the package knows."""


def source(architecture, **changes):
    """The model, its Hugging Face config and its tensors."""
    name, _ = FAMILIES[architecture]
    model = importlib.import_module(f"inl.models.{name}").MODEL
    files = random_family(model, name, **CHANGES | changes)
    tensors = {each: files.tensor(each).data.copy() for each in files.names()}
    if files.config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return model, dict(files.config), tensors


def converted(tensors):
    found = {}
    for name, values in stacked(tensors).items():
        for pattern, other in PUBLISHED.items():
            name = re.sub(pattern, other, name)
        found[name] = values.squeeze(1) if "conv.conv" in name else values
    return found


def written(path, architecture, hf, tensors, **changes):
    _, arch = FAMILIES[architecture]
    names = gguf.get_tensor_name_map(arch, LAYERS)
    heads = hf["num_key_value_heads"]
    counts = [heads * (kind != "conv") for kind in hf["layer_types"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(changes.get("heads", counts))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_shortconv_l_cache(3)
    if architecture == "lfm2moe":
        writer.add_expert_count(hf["num_experts"])
        writer.add_expert_used_count(hf["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
        writer.add_leading_dense_block_count(hf["num_dense_layers"])
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(changes.get("kind", kinds.SIGMOID))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    for name, values in converted(tensors).items():
        at = names.get_name(name, (".weight", ".bias"))
        assert at is not None, name
        writer.add_tensor(at, np.ascontiguousarray(values, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model, checkpoint):
    backend = ReferenceBackend(Device("reference"), dtype="float64")
    runner = local_runner(backend, model, checkpoint, LIMITS, dtype="float64")
    return prompt_logits(runner, [5, 3, 39, 0, 17, 90, 2])


@pytest.mark.parametrize(
    ("architecture", "tied"), [("lfm2", True), ("lfm2", False), ("lfm2moe", True)]
)
def test_logits_match_the_source_model(architecture, tied, tmp_path):
    model, hf, tensors = source(architecture, tie_word_embeddings=tied)
    path = written(tmp_path / "m.gguf", architecture, hf, tensors)
    with closing(open_checkpoint(path)) as checkpoint:
        assert checkpoint.config["layer_types"] == hf["layer_types"]
        found = logits_of(model, checkpoint)
    expected = logits_of(model, MemoryCheckpoint(hf, tensors))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=2e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": [0, 2, 0, 3]}, r"head_count_kv: found \[0, 2, 0, 3\].*the same"),
        ({"heads": [0, 0, 0, 0]}, r"head_count_kv: found \[0, 0, 0, 0\].*the same"),
        ({"heads": [0, 2]}, r"head_count_kv: found \[0, 2\]; accepted: .*one a layer"),
        ({"heads": [0, 2, 0, -2]}, r"head_count_kv: .*accepted: 0 or more"),
        (
            {"kind": gguf.ExpertGatingFuncType.SOFTMAX},
            r"expert_gating_func: found 1; accepted: 2, sigmoid",
        ),
    ],
)
def test_other_metadata_is_refused(changes, message, tmp_path):
    _, hf, tensors = source("lfm2moe")
    path = written(tmp_path / "m.gguf", "lfm2moe", hf, tensors, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
