"""Mapping of GGUF tensor names to those of the Hugging Face layout, by family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError

NUMBER: Final = "0|[1-9][0-9]*"
"""Pattern of a layer or expert number."""

LAST_NORM: Final = "output_norm"

GLOBAL_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    LAST_NORM: "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}

LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

HEAD_NORMS: Final = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}

POST_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

QWEN3_NAMES: Final = LAYER_NAMES | HEAD_NORMS
GEMMA2_NAMES: Final = (
    LAYER_NAMES | POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
)
GEMMA3_NAMES: Final = GEMMA2_NAMES | HEAD_NORMS
GEMMA4_NAMES: Final = GEMMA3_NAMES | {
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
OLMO2_NAMES: Final = LAYER_NAMES | POST_NORMS | HEAD_NORMS
PHI3_NAMES: Final = LAYER_NAMES | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}

MIXTRAL_NAMES: Final = LAYER_NAMES | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
    "ffn_gate.{}": "block_sparse_moe.experts.{}.w1",
    "ffn_up.{}": "block_sparse_moe.experts.{}.w3",
    "ffn_down.{}": "block_sparse_moe.experts.{}.w2",
}
"""Files from before April 2024 have one numbered tensor per expert."""

QWEN3_MOE_NAMES: Final = QWEN3_NAMES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}

DELTA_NAMES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""Recurrent layers; early files of Qwen3-Next have ``ssm_in``."""

QWEN35_NAMES: Final = QWEN3_NAMES | DELTA_NAMES
QWEN35_MOE_NAMES: Final = (
    QWEN3_MOE_NAMES
    | DELTA_NAMES
    | {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)


FFN_NORM: Final = {"post_attention_norm": "post_attention_layernorm"}
"""Name of the norm of feed-forward layers in some families."""
ROUTER_BIAS: Final = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
SHARED_EXPERTS: Final = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
DRAFT_NAMES: Final = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""Layers that predict further tokens."""
EXAONE4_NAMES: Final = QWEN3_NAMES | POST_NORMS
HUNYUAN_NAMES: Final = LAYER_NAMES | {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
DOTS1_NAMES: Final = QWEN3_MOE_NAMES | SHARED_EXPERTS | ROUTER_BIAS
GLM4_MOE_NAMES: Final = DOTS1_NAMES | FFN_NORM | DRAFT_NAMES
MINIMAX_M2_NAMES: Final = (
    MIXTRAL_NAMES
    | HEAD_NORMS
    | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
)
GPT_OSS_NAMES: Final = (
    QWEN3_MOE_NAMES
    | FFN_NORM
    | {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"}
)


LFM2_NAMES: Final = QWEN3_NAMES | {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
MAMBA_NAMES: Final = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""Layers of Mamba-2."""
BAMBA_NAMES: Final = LAYER_NAMES | MAMBA_NAMES
FALCON_H1_NAMES: Final = BAMBA_NAMES | dict.fromkeys(
    ("ffn_norm", "ffn_norm.weight"), "post_attention_layernorm.weight"
)
"""The norm's name has no ``.weight`` in files of Falcon-H1."""
GRANITE_HYBRID_NAMES: Final = BAMBA_NAMES | {
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
NEMOTRON_H_NAMES: Final = LAYER_NAMES | {
    name: target.replace("mamba.", "mixer.") for name, target in MAMBA_NAMES.items()
} | {
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """Conventions of the files of one ``general.architecture``."""

    architecture: str
    """Class name in ``architectures`` of the Hugging Face config."""
    model_type: str
    layer_names: Mapping[str, str]
    """Modules, and whole names of tensors that are not of a module in both layouts."""
    permuted: bool = False
    """Whether the rows of q and k are ordered for a rotation of adjacent pairs."""
    norm_offset: float = 0.0
    """Offset that the stored norm weights include, except those of recurrent layers."""
    last_norm: str = LAST_NORM
    """Name of the norm before the head."""


FAMILIES: Final = {
    "llama": Family("LlamaForCausalLM", "llama", LAYER_NAMES, permuted=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", LAYER_NAMES),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", QWEN3_NAMES),
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", LAYER_NAMES),
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3", QWEN3_NAMES),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", GEMMA2_NAMES, norm_offset=1.0),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", GEMMA3_NAMES, norm_offset=1.0),
    "gemma4": Family("Gemma4ForCausalLM", "gemma4_text", GEMMA4_NAMES),
    "phi3": Family("Phi3ForCausalLM", "phi3", PHI3_NAMES),
    "qwen35": Family(
        "Qwen3_5ForCausalLM", "qwen3_5_text", QWEN35_NAMES, norm_offset=1.0
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", OLMO2_NAMES),
    "arcee": Family("ArceeForCausalLM", "arcee", LAYER_NAMES, permuted=True),
    "mistral3": Family(
        "Ministral3ForCausalLM", "ministral3", LAYER_NAMES, permuted=True
    ),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", LAYER_NAMES | FFN_NORM),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", LAYER_NAMES),
    "paddleocr": Family(
        "PaddleOCRVLForConditionalGeneration", "paddleocr_vl_text", LAYER_NAMES
    ),
    "hunyuan-dense": Family(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", HUNYUAN_NAMES
    ),
    "exaone4": Family("Exaone4ForCausalLM", "exaone4", EXAONE4_NAMES),
    "gemma": Family("GemmaForCausalLM", "gemma", LAYER_NAMES, norm_offset=1.0),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", LFM2_NAMES, last_norm="token_embd_norm"),
    "apertus": Family("ApertusForCausalLM", "apertus", QWEN3_NAMES),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", GRANITE_HYBRID_NAMES
    ),
    "falcon-h1": Family("FalconH1ForCausalLM", "falcon_h1", FALCON_H1_NAMES),
    "nemotron_h": Family("NemotronHForCausalLM", "nemotron_h", NEMOTRON_H_NAMES),
}
"""Dense families by ``general.architecture``; Mistral files use "llama"."""

MOE_FAMILIES: Final = {
    "llama": Family("MixtralForCausalLM", "mixtral", MIXTRAL_NAMES, permuted=True),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", QWEN3_MOE_NAMES),
    "qwen3next": Family(
        "Qwen3NextForCausalLM", "qwen3_next", QWEN35_MOE_NAMES, norm_offset=1.0
    ),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN35_MOE_NAMES, norm_offset=1.0
    ),
    "glm4moe": Family("Glm4MoeForCausalLM", "glm4_moe", GLM4_MOE_NAMES),
    "dots1": Family("Dots1ForCausalLM", "dots1", DOTS1_NAMES),
    "exaone-moe": Family("ExaoneMoeForCausalLM", "exaone_moe", DOTS1_NAMES),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", "minimax_m2", MINIMAX_M2_NAMES),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", QWEN3_MOE_NAMES),
    "lfm2moe": Family(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        QWEN3_MOE_NAMES | LFM2_NAMES | ROUTER_BIAS,
        last_norm="token_embd_norm",
    ),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", GPT_OSS_NAMES),
    "gemma4": FAMILIES["gemma4"],
    "granitehybrid": FAMILIES["granitehybrid"],
    "nemotron_h_moe": FAMILIES["nemotron_h"],
}
"""Mixtures of experts by ``general.architecture``; Mixtral files use "llama"."""

BAMBA: Final = Family("BambaForCausalLM", "bamba", BAMBA_NAMES, permuted=True)
"""Files of "granitehybrid" with :data:`ROTATED`."""
ROTATED: Final = "rope.scaling.finetuned"
"""Key by which files of hybrids say that queries and keys are rotated."""


def hf_name(
    name: str,
    layer_names: Mapping[str, str] = LAYER_NAMES,
    *,
    last_norm: str = LAST_NORM,
) -> str:
    """Convert a tensor name, for example ``blk.3.attn_q.weight`` to
    ``model.layers.3.self_attn.q_proj.weight``; an unknown name stays as it is.
    """
    stem, dot, kind = name.rpartition(".")
    stem = LAST_NORM if stem == last_norm else stem
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}{dot}{kind}"
    layer = re.fullmatch(rf"blk\.({NUMBER})\.(.+)", name)
    if layer:
        index, rest = layer.groups()
        if rest in layer_names:
            return f"model.layers.{index}.{layer_names[rest]}"
        module, expert = rest.rpartition(".")[0], ""
        if numbered := re.fullmatch(rf"(\w+)\.({NUMBER})", module):
            module, expert = f"{numbered[1]}.{{}}", numbered[2]
        if module in layer_names:
            target = layer_names[module].replace("{}", expert)
            return f"model.layers.{index}.{target}{dot}{kind}"
    return name


def is_projector(name: str) -> bool:
    """Return whether a GGUF file is called as the image encoder beside a model."""
    return name.rpartition("/")[2].lower().startswith("mmproj")


def architecture(metadata: Mapping[str, Any], where: Path) -> str:
    """Return ``general.architecture``.

    Raises :class:`CheckpointError` if it is missing or the file is a part of a split
    model.
    """
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{where}: split.count: found {show(parts)}; accepted: a whole model "
            "in one file (llama-gguf-split --merge joins the parts)"
        )
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise CheckpointError(
            f"{where}: general.architecture: found {show(name)}; accepted: a name"
        )
    return name


def family(metadata: Mapping[str, Any], name: str) -> Family | None:
    """Return the family of an architecture, or ``None`` if it is unknown."""
    if name == "granitehybrid" and metadata.get(f"{name}.{ROTATED}"):
        return BAMBA
    experts = metadata.get(f"{name}.expert_count", 0)
    return (MOE_FAMILIES if experts else FAMILIES).get(name)
