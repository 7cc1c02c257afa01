"""Models with layers of Mamba-2 in GGUF files, written by the reference package.

Names, metadata and transformations are those of llama.cpp's converter (``conversion/``:
granite.py, falcon_h1.py, mamba.py, nemotron.py).
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
from inl.models import mamba2
from inl.spec.limits import Limits
from inl.testing.oracle import prompt_logits
from inl.testing.tiny import MemoryCheckpoint, local_runner
from random_families import random_family
from stacked_experts import stacked

LAYERS, VOCAB = 4, 96
LIMITS = Limits(slots=3, blocks=(12,), block_size=4, max_blocks_per_seq=4, vocab=VOCAB)
ARCH = gguf.MODEL_ARCH
CASES = {
    "granite": ("granite_hybrid", ARCH.GRANITE_HYBRID, {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 4.0,
    }),
    "granite, dense": ("granite_hybrid", ARCH.GRANITE_HYBRID, {
        "num_local_experts": 0, "shared_intermediate_size": 80,
    }),
    "bamba": ("bamba", ARCH.GRANITE_HYBRID, {}),
    "falcon": ("falcon_h1", ARCH.FALCON_H1, {
        "mamba_norm_before_gate": False, "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.6, "key_multiplier": 0.5, "embedding_multiplier": 3.0,
        "attention_out_multiplier": 0.7, "lm_head_multiplier": 0.8,
    }),
    "falcon, no norm": ("falcon_h1", ARCH.FALCON_H1, {"mamba_rms_norm": False}),
    "nemotron": ("nemotron_h", ARCH.NEMOTRON_H, {
        "hybrid_override_pattern": "M*-M", "mlp_bias": True,
    }),
    "nemotron, experts": ("nemotron_h", ARCH.NEMOTRON_H_MOE, {
        "hybrid_override_pattern": "ME*E", "moe_latent_size": 16,
        "routed_scaling_factor": 1.7,
    }),
}  # fmt: skip
PUBLISHED = {
    r"\.mixer\.experts\.(up|down)_proj": r".mlp.experts.\1_proj",
    r"\.self_attn\.([qkvo]_proj)": r".mixer.\1",
    r"^model\.layers\.(\d+)\.(norm|mixer)\b": r"backbone.layers.\1.\2",
    r"^model\.embed_tokens": "backbone.embeddings",
    r"^model\.norm\.": "backbone.norm_f.",
    r"e_score_correction_bias": "e_score_correction.bias",
}
"""Parts of our names of Nemotron-H, and what published files have."""
CONSTANTS = mamba2.ONES, mamba2.SCALE


def source(case):
    """The model, its Hugging Face config and its tensors."""
    name, _, changes = CASES[case]
    model = importlib.import_module(f"inl.models.{name}").MODEL
    changes = {"tie_word_embeddings": False, "rms_norm_eps": 1e-5} | changes
    files = random_family(model, name, **changes)
    tensors = {
        each: files.tensor(each).data.copy()
        for each in files.names()
        if not each.endswith(CONSTANTS)
    }
    return model, dict(files.config), tensors


def sizes(hf):
    """Heads, head_dim and groups of Mamba-2."""
    if "mamba_num_heads" in hf:
        return hf["mamba_num_heads"], hf["mamba_head_dim"], hf["n_groups"]
    return hf["mamba_n_heads"], hf["mamba_d_head"], hf["mamba_n_groups"]


def pairs(values, heads):
    """Rows of q or k for a rotation of adjacent pairs."""
    half = values.shape[0] // heads // 2
    parts = values.reshape(heads, 2, half, *values.shape[1:])
    return parts.swapaxes(1, 2).reshape(values.shape)


def multiplied(name, values, hf):
    """Fold the constant factors of Falcon-H1 as the converter does."""
    down, one = hf["mlp_multipliers"], 1.0
    factors = {
        "mlp.down_proj": down[1], "mlp.gate_proj": down[0],
        "k_proj": hf.get("key_multiplier", one) * hf["attention_in_multiplier"],
        "q_proj": hf["attention_in_multiplier"],
        "v_proj": hf["attention_in_multiplier"],
        "o_proj": hf.get("attention_out_multiplier", one),
        "out_proj": hf.get("ssm_out_multiplier", one),
        "lm_head": hf.get("lm_head_multiplier", one),
        "embed_tokens": hf.get("embedding_multiplier", one),
    }  # fmt: skip
    if "in_proj" in name:
        heads, dim, groups = sizes(hf)
        keys = groups * hf["mamba_d_state"]
        parts = [heads * dim, heads * dim, keys, keys, heads]
        rows = np.repeat(hf["ssm_multipliers"], parts)
        return values * rows[:, None] * hf.get("ssm_in_multiplier", one)
    return values * next((x for part, x in factors.items() if part in name), one)


def converted(hf, tensors, kind):
    """Yield names that the package knows, and values."""
    heads, dim, groups = sizes(hf)
    for name, values in stacked(tensors).items():
        if kind == "nemotron_h":
            for pattern, other in PUBLISHED.items():
                name = re.sub(pattern, other, name)
        if kind == "falcon_h1":
            values = multiplied(name, values, hf)
        if kind == "bamba" and (found := re.search(r"\.([qk])_proj", name)):
            count = "num_attention_heads" if found[1] == "q" else "num_key_value_heads"
            values = pairs(values, hf[count])
        if kind == "falcon_h1":
            name = name.replace("post_attention_layernorm", "pre_ff_layernorm")
        if name.endswith(".dt_bias"):
            name = name.replace(".dt_bias", ".dt_proj.bias")
        elif name.endswith("conv1d.weight"):
            values = values.squeeze(1)
        elif name.endswith(".A_log"):
            values = -np.exp(values.astype("f8"))[:, None]
        elif name.endswith(".D"):
            values = values[:, None]
        elif re.search(r"(mamba|mixer)\.norm\.weight$", name):
            values = values.reshape(groups, heads * dim // groups)
        if ".input_linear" in name:
            half = values.shape[-2] // 2
            stem = name.replace("shared_mlp.input_linear", "mlp.shared_mlp.{}_proj")
            stem = stem.replace("input_linear", "experts.{}")
            if not hf["num_local_experts"]:
                stem = stem.replace("mlp.shared_mlp", "mlp")
            yield stem.format("gate"), values[..., :half, :]
            yield stem.format("up"), values[..., half:, :]
            continue
        if not hf.get("num_local_experts", 1):
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
        yield name, values


def kinds_of(hf):
    """Whether each layer has heads of keys, and whether it has a feed-forward layer."""
    if "hybrid_override_pattern" in hf:
        pattern = hf["hybrid_override_pattern"]
        return [x == "*" for x in pattern], [x in "-E" for x in pattern]
    if "attn_layer_indices" in hf:
        return [at in hf["attn_layer_indices"] for at in range(LAYERS)], None
    if "layer_types" in hf:
        return [kind == "attention" for kind in hf["layer_types"]], None
    return None, None


def written(path, case, hf, tensors, **changes):
    kind, arch, _ = CASES[case]
    names = gguf.get_tensor_name_map(arch, LAYERS)
    (heads, dim, groups), kv = sizes(hf), hf["num_key_value_heads"]
    attends, feeds = kinds_of(hf)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(LAYERS)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    inner = hf["intermediate_size"]
    if arch == ARCH.NEMOTRON_H_MOE:
        inner = hf["moe_intermediate_size"]
    widths = changes.get("widths", feeds and [inner * each for each in feeds])
    writer.add_feed_forward_length(inner if widths is None else widths)
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(kv if attends is None else [kv * x for x in attends])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(hf.get("mamba_d_state", hf.get("ssm_state_size")))
    writer.add_ssm_group_count(groups)
    writer.add_ssm_inner_size(changes.get("inner", heads * dim))
    writer.add_ssm_time_step_rank(heads)
    if "head_dim" in hf:
        writer.add_key_length(hf["head_dim"])
    if arch == ARCH.GRANITE_HYBRID:
        writer.add_rope_scaling_finetuned(kind == "bamba")
    if kind == "granite_hybrid":
        writer.add_attention_scale(hf.get("attention_multiplier", 1.0))
        writer.add_embedding_scale(hf.get("embedding_multiplier", 1.0))
        writer.add_residual_scale(hf["residual_multiplier"])
        writer.add_logit_scale(hf.get("logits_scaling", 1.0))
        writer.add_expert_count(hf["num_local_experts"])
        writer.add_expert_used_count(hf["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(hf["shared_intermediate_size"])
    if arch == ARCH.NEMOTRON_H_MOE:
        writer.add_expert_count(hf["n_routed_experts"])
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(inner)
        writer.add_expert_shared_feed_forward_length(
            hf["moe_shared_expert_intermediate_size"]
        )
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(value=True)
        writer.add_expert_weights_scale(hf["routed_scaling_factor"])
        writer.add_expert_group_count(1)
        writer.add_moe_latent_size(hf["moe_latent_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(VOCAB)])
    for name, values in converted(hf, tensors, kind):
        at = names.get_name(name, (".weight", ".bias"))
        assert at is not None, name
        writer.add_tensor(at, np.ascontiguousarray(values, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model, checkpoint):
    _, checkpoint = model.adapt(model.config(checkpoint.config), checkpoint)
    backend = ReferenceBackend(Device("reference"), dtype="float64")
    runner = local_runner(backend, model, checkpoint, LIMITS, dtype="float64")
    return prompt_logits(runner, [5, 3, 39, 0, 17, 90, 2])


@pytest.mark.parametrize("case", CASES)
def test_logits_match_the_source_model(case, tmp_path):
    model, hf, tensors = source(case)
    path = written(tmp_path / "m.gguf", case, hf, tensors)
    with closing(open_checkpoint(path)) as checkpoint:
        found = logits_of(model, checkpoint)
    expected = logits_of(model, MemoryCheckpoint(hf, tensors))
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=2e-6)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "falcon",
            {"inner": 97},
            "inner_size: found 97; accepted: a multiple of 6",
        ),
        ("bamba", {"inner": 102}, "ssm.inner_size: found 102; accepted: .* of 48"),
        (
            "nemotron",
            {"widths": [0, 0, 80, 81]},
            r"feed_forward_length: found \[80, 81\]; accepted: the same number",
        ),
    ],
)
def test_other_metadata_is_refused(case, changes, message, tmp_path):
    _, hf, tensors = source(case)
    path = written(tmp_path / "m.gguf", case, hf, tensors, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)
