"""Tiny models of every family, made by transformers, and their logits by ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.executor.model_loader import LanguageModel, open_model
from inl.runners.local_runner import Loaded, LocalRunner
from inl.spec.cache import Paged
from inl.spec.limits import Limits
from inl.spec.message import Row, admit_frame, release_frame, step_frame
from inl.spec.selection import KernelSelection
from inl.spec.step import Bucket
from inl.weights.load import load_weights, stored_specs
from inl.weights.plan import plan_weights

TOKENS, VOCAB, LAYERS, WINDOW = 40, 96, 4, 7
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": LAYERS, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def rope(kind="default", theta=500.0, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0)
LONG = rope(
    "longrope", short_factor=[1.0, 1.3, 2.0], long_factor=[1.0, 5.0, 9.0],
    partial_rotary_factor=0.75,
)  # fmt: skip
LOCAL = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": WINDOW}
GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "num_global_key_value_heads": 1,
    "sliding_window": WINDOW, "layer_types": KINDS, "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e3,
                           "partial_rotary_factor": 0.4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}  # fmt: skip
SPLIT = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}

PUBLISHED = rope(
    "llama3", theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

MLA = {
    "kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 6,
    "n_shared_experts": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}  # fmt: skip

LATENTS = (
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2, "logits_scaling": 4.0,
}  # fmt: skip

INDEXED = {
    "num_key_value_heads": 6, "index_topk": 9, "index_n_heads": 8, "index_head_dim": 12,
}  # fmt: skip

DELTA = {
    "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3,
    "attention_bias": True, "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
}  # fmt: skip
SPARSE = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
MROPE = rope(partial_rotary_factor=0.5, mrope_section=[1, 1, 1], mrope_interleaved=True)

MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 10,
    "mamba_d_conv": 3, "mamba_chunk_size": 8,
}  # fmt: skip
CONVS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}

SIGMOID = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "n_group": 3, "topk_group": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip

FAMILIES = {
    "llama3": ("Llama", LLAMA3),
    "llama3-published": ("Llama", PUBLISHED | {"max_position_embeddings": 16384}),
    "llama-linear": ("Llama", rope("linear", factor=3.0) | {"head_dim": 12}),
    "llama-yarn": ("Llama", YARN | {"tie_word_embeddings": True}),
    "mistral": ("Mistral", rope() | {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral-full": ("Mistral", rope() | {"sliding_window": None}),
    "qwen2": ("Qwen2", rope()),
    "qwen2-window": ("Qwen2", rope() | SPLIT),
    "qwen3": ("Qwen3", rope() | {"head_dim": 16}),
    "qwen3-window": ("Qwen3", rope() | SPLIT | {"head_dim": 16}),
    "gemma2": ("Gemma2", rope() | GEMMA | CAPS),
    "gemma3": ("Gemma3", LOCAL | GEMMA | {"layer_types": [*KINDS[1:], KINDS[1]]}),
    "gemma4": ("Gemma4", GEMMA4 | {"attention_k_eq_v": True}),
    "gemma4-small": (
        "Gemma4",
        GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": [*KINDS, *KINDS[:2]],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "phi3": ("Phi3", rope() | {"sliding_window": WINDOW}),
    "phi3-long": (
        "Phi3",
        LONG | {"max_position_embeddings": 256, "original_max_position_embeddings": 64},
    ),
    "olmo2": ("Olmo2", rope()),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "rope_parameters": {
                "full_attention": {**YARN["rope_parameters"], "rope_theta": 5e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "smollm3": (
        "SmolLM3",
        rope()
        | {
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
        },
    ),
    "granite": (
        "Granite",
        rope()
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "glm": ("Glm", rope(partial_rotary_factor=0.5) | {"head_dim": 12}),
    "glm4": ("Glm4", rope(partial_rotary_factor=0.5) | {"head_dim": 12}),
    "gpt-oss": (
        "GptOss",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=8.0,
            truncate=False,
        )
        | {
            "head_dim": 12,
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "swiglu_alpha": 1.3,
        },
    ),
    "llama-bias-gelu": ("Llama", rope() | {"mlp_bias": True, "hidden_act": "gelu"}),
    "cohere": ("Cohere", rope() | {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": (
        "Cohere2",
        rope() | {"logit_scale": 0.3, "sliding_window": WINDOW, "layer_types": KINDS},
    ),
    "starcoder2": ("Starcoder2", rope() | {"sliding_window": WINDOW}),
    "deepseek2": (
        "DeepseekV2",
        MLA | rope() | {"q_lora_rank": None, "num_key_value_heads": 6},
    ),
    "deepseek2-groups": (
        "DeepseekV2",
        MLA
        | rope()
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "num_key_value_heads": 6,
            "routed_scaling_factor": 3.0,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        rope(partial_rotary_factor=0.5) | DELTA | SPARSE | {"mlp_only_layers": [2]},
    ),
    "qwen3.5": ("Qwen3_5", MROPE | DELTA),
    "qwen3.5-moe": ("Qwen3_5Moe", MROPE | DELTA | SPARSE),
    "llama4": (
        "Llama4",
        rope()
        | {
            "head_dim": 12,
            "intermediate_size_mlp": 56,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "attention_bias": True,
        },
    ),
    "deepseek3.2": (
        "DeepseekV32",
        YARN | MLA | INDEXED | {"n_group": 3, "topk_group": 2, "attention_bias": True},
    ),
    "glm5": (
        "GlmMoeDsa",
        rope()
        | MLA
        | INDEXED
        | {
            "n_group": 1,
            "topk_group": 1,
            "indexer_types": ["full", "shared", "full", "shared"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "deepseek3": (
        "DeepseekV3",
        MLA
        | {
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=0.7,
                beta_fast=8.0,
            ),
            "n_group": 3,
            "topk_group": 2,
            "num_key_value_heads": 6,
            "attention_bias": True,
        },
    ),
    "arcee": ("Arcee", rope() | {"attention_bias": True}),
    "seed-oss": ("SeedOss", rope() | {"head_dim": 12, "attention_out_bias": True}),
    "ernie4.5": ("Ernie4_5", rope() | {"head_dim": 12, "use_bias": True}),
    "hunyuan": (
        "HunYuanDenseV1",
        rope("dynamic", alpha=30.0, factor=1.0) | {"head_dim": 12},
    ),
    "exaone4": (
        "Exaone4",
        rope() | {"sliding_window": WINDOW, "sliding_window_pattern": 3},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        rope()
        | {
            "head_dim": 12,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "gemma": ("Gemma", rope() | {"head_dim": 16, "hidden_act": "gelu"}),
    "ministral3": (
        "Ministral3",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.7,
        )
        | {"head_dim": 12},
    ),
    "glm4-moe": (
        "Glm4Moe",
        rope(partial_rotary_factor=0.5)
        | SIGMOID
        | {"head_dim": 12, "use_qk_norm": True, "attention_bias": True},
    ),
    "dots1": (
        "Dots1",
        rope()
        | SIGMOID
        | {"sliding_window": WINDOW, "max_window_layers": 2, "norm_topk_prob": True},
    ),
    "cwm": ("Cwm", LLAMA3 | {"head_dim": 12, "sliding_window": WINDOW}),
    "ministral": (
        "Ministral",
        rope() | {"sliding_window": WINDOW, "layer_types": KINDS, "head_dim": 16},
    ),
    "helium": ("Helium", rope() | {"head_dim": 8, "attention_bias": True}),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        MLA
        | rope()
        | {
            "num_key_value_heads": 6,
            "n_group": 3,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        rope() | {"head_dim": 12, "num_experts": 6, "moe_topk": 2},
    ),
    "granite-moe": (
        "GraniteMoeShared",
        rope()
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "stablelm": (
        "StableLm",
        rope(partial_rotary_factor=0.5) | {"use_qkv_bias": True},
    ),
    "nemotron": (
        "Nemotron",
        rope(partial_rotary_factor=0.5) | {"head_dim": 12, "attention_bias": True},
    ),
    "apertus": ("Apertus", LLAMA3 | {"head_dim": 12, "attention_bias": True}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        rope()
        | {
            "head_dim": 12,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
        },
    ),
    "gpt2": (
        "GPT2",
        {"n_inner": 80, "scale_attn_weights": False, "layer_norm_epsilon": 1e-3},
    ),
    "gpt-bigcode": ("GPTBigCode", {"n_inner": 80}),
    "gpt-neo": (
        "GPTNeo",
        {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    ),
    "gptj": ("GPTJ", {"rotary_dim": 4, "n_inner": 80}),
    "codegen": ("CodeGen", {"rotary_dim": 8, "num_attention_heads": 4}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "falcon": ("Falcon", rope() | {"bias": True}),
    "falcon-new": (
        "Falcon",
        rope() | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "jais2": ("Jais2", rope()),
    "vaultgemma": ("VaultGemma", rope() | GEMMA | CAPS),
    "solar-open": (
        "SolarOpen",
        rope() | SIGMOID | {"head_dim": 12, "attention_bias": True},
    ),
    "gpt-neox": ("GPTNeoX", rope(partial_rotary_factor=0.5)),
    "gpt-neox-serial": (
        "GPTNeoX",
        rope(partial_rotary_factor=0.25)
        | {"use_parallel_residual": False, "num_attention_heads": 6},
    ),
    "phi": ("Phi", rope(partial_rotary_factor=0.5)),
    "olmo": ("Olmo", rope() | {"clip_qkv": 0.9}),
    "olmoe": ("Olmoe", rope() | {"num_experts": 6, "num_experts_per_tok": 2}),
    "minimax-m2": (
        "MiniMaxM2",
        rope(partial_rotary_factor=0.5)
        | {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "position_embedding_type": "nope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "bamba": ("Bamba", MAMBA | rope() | {"attn_layer_indices": [1, 3]}),
    "falcon-h1": (
        "FalconH1",
        MAMBA
        | rope()
        | {
            "head_dim": 12,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "num_hidden_layers": 2,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "mlp_multipliers": [0.6, 1.3],
            "key_multiplier": 0.5,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.6, 0.7, 0.8, 0.9, 1.2],
            "ssm_out_multiplier": 0.6,
            "projectors_bias": True,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "mlp"],
            "head_dim": 12,
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "n_groups": 2,
            "ssm_state_size": 8,
            "conv_kernel": 3,
            "chunk_size": 8,
            "time_step_min": 1e-9,
            "mlp_bias": True,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 16,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "lfm2": (
        "Lfm2",
        rope()
        | CONVS
        | {
            "norm_eps": 1e-3,
            "conv_bias": True,
            "block_multiple_of": 12,
            "block_ffn_dim_multiplier": 0.9,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        rope()
        | CONVS
        | {
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "conv_L_cache": 2,
        },
    ),
    "youtu": (
        "Youtu",
        {name: MLA[name] for name in LATENTS} | rope() | {"num_key_value_heads": 6},
    ),
    "minicpm3": (
        "MiniCPM3",
        {name: MLA[name] for name in LATENTS}
        | rope()
        | {"num_key_value_heads": 6, "scale_emb": 3, "dim_model_base": 12},
    ),
    "axk1": (
        "AXK1",
        MLA | rope() | {"n_group": 3, "topk_group": 2, "num_key_value_heads": 6},
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        rope() | GRANITE | {"logits_scaling": 0.3, "head_dim": 12},
    ),
    "granite-swa": (
        "GraniteSWA",
        rope()
        | GRANITE
        | {
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "layer_rope_theta": [500.0, 0, 50.0, 500.0],
        },
    ),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        rope()
        | GRANITE
        | {
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "flex-olmo": ("FlexOlmo", rope() | {"num_experts": 6, "num_experts_per_tok": 2}),
    "hy3": (
        "HYV3",
        rope()
        | {
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "flint": (
        "Flint",
        rope()
        | {
            "head_dim": 12,
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [1],
        },
    ),
    "mellum": (
        "Mellum",
        LOCAL
        | {
            "head_dim": 12,
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "nanochat": (
        "NanoChat",
        rope() | {"attention_bias": True, "final_logit_softcapping": 2.0},
    ),
    "gemma3n": (
        "Gemma3n",
        LOCAL
        | {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": [*KINDS, *KINDS[:2]],
            "num_kv_shared_layers": 2,
            "intermediate_size": [80, 64, 80, 80, 48, 80],
            "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.3, 0.0],
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": VOCAB - 20,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 12,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {
            name: value
            for name, value in GEMMA4.items()
            if name != "hidden_size_per_layer_input"
        }
        | {"attention_k_eq_v": True},
    ),
    "biogpt": ("BioGpt", {}),
    "persimmon": ("Persimmon", rope(partial_rotary_factor=0.5)),
    "afmoe": (
        "Afmoe",
        rope()
        | {
            "head_dim": 12,
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "cohere2-moe": (
        "Cohere2Moe",
        rope()
        | {
            "head_dim": 12,
            "logit_scale": 0.3,
            "sliding_window": WINDOW,
            "layer_types": KINDS,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 56,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
        },
    ),
}
"""Name: its class in transformers and what its config has beside :data:`SIZES`."""

OF_OTHERS = (
    "youtu", "minicpm3", "axk1", "hyperclovax", "granite-swa", "granite-moe-swa",
    "flex-olmo", "hy3", "flint", "mellum", "nanochat", "gemma4-unified",
    "biogpt", "persimmon", "afmoe", "cohere2-moe",
)  # fmt: skip
"""Families all of whose ops others have, so that few backends show what they show."""

CENTERED = "Gemma", "Gemma2", "Gemma3"
"""Families whose norms have weights minus 1."""


class Made(NamedTuple):
    """A model on disk, a text, and what transformers computes for it."""

    path: Any
    ids: list[int]
    logits: Any
    """[TOKENS, VOCAB] float32."""


def make(name, path, **changes):
    """Save a random model of a family, with changed fields, under ``path``."""
    kind, fields = FAMILIES[name]
    texts = (
        "Gemma3",
        "Gemma3n",
        "Gemma4",
        "Gemma4Unified",
        "Llama4",
        "Qwen3_5",
        "Qwen3_5Moe",
    )
    text = "Text" if kind in texts else ""
    config = getattr(transformers, f"{kind}{text}Config")(**SIZES | fields | changes)
    config._attn_implementation = "eager"
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    source = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, weight in tensors(model):
            weight.copy_(_random(key, weight.shape, source, centered=kind in CENTERED))
    model.save_pretrained(path)
    ids = torch.randint(3, VOCAB, (1, TOKENS), generator=source)
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
    return Made(path, ids[0].tolist(), logits)


def tensors(model):
    """Parameters, and the buffers that checkpoints have."""
    stored = set(model.state_dict())
    yield from model.named_parameters()
    yield from ((key, each) for key, each in model.named_buffers() if key in stored)


def _random(key, shape, source, *, centered):
    """Of a size that lets every term matter: softmax neither flat nor a maximum."""
    values = torch.randn(shape, generator=source)
    if key.endswith("A_log"):
        return values - 2  # so that many tokens are remembered
    if key.endswith("act_fn.eps"):
        return torch.full(shape, -1e-6)
    if key.endswith("bias"):
        return 0.5 * values
    if len(shape) < 2:
        return 0.3 * values + (0 if centered else 1)
    if "embed_tokens" in key:
        return values
    return 1.6 * values / shape[-1] ** 0.5


def reference(dtype="float64"):
    return ReferenceBackend(Device("reference:0"), dtype=dtype)


def load(
    language: LanguageModel, backend, dtype, *, weights=None, block_size=4
) -> LocalRunner:
    """A runner for few tokens; ``weights`` may change what was loaded."""
    from dataclasses import replace

    config = replace(language.config, dtype=dtype)
    kernels = tuple(backend.kernels())
    stored = stored_specs(language.checkpoint)
    groups = plan_weights(language.model.weights(config), kernels, stored)
    held = load_weights(groups, language.checkpoint, backend, dtype)
    held = weights(held) if weights else held
    loaded = Loaded(language.model, config, groups, held, KernelSelection(kernels))
    count = sum(isinstance(item, Paged) for item in language.model.state(config))
    limits = Limits(
        slots=4, blocks=(48,) * count, block_size=block_size, max_blocks_per_seq=12,
        vocab=VOCAB,
    )  # fmt: skip
    return LocalRunner(backend, loaded, limits)


def opened(made, backend, dtype="float32", **options):
    return load(open_model(made.path), backend, dtype, **options)


def logits(runner, ids, cuts=()):
    """Logits [len(ids), VOCAB] of a text given in pieces that begin at ``cuts``."""
    return logits_of(runner, {1: ids}, [dict.fromkeys([1], c) for c in cuts])[1]


def logits_of(runner, texts, stops=()):
    """Logits of several texts, all rows of each step but those that are done.

    ``stops``: for each step, how far each slot's text is computed after it; the last
    step computes what is left.
    """
    groups, size = runner.limits.groups, runner.limits.block_size
    for slot, ids in texts.items():
        free = range(1 + 12 * (slot - 1), 1 + 12 * slot)
        # Every group has blocks of its own in an order of its own.
        tables = [[*free][:: 1 if group % 2 else -1] for group in range(groups)]
        runner.submit(admit_frame(slot, tables, groups=groups, max_blocks_per_seq=12))
        assert len(ids) <= 12 * size
    done, found = dict.fromkeys(texts, 0), {slot: [] for slot in texts}
    last = {slot: len(ids) for slot, ids in texts.items()}
    for number, stop in enumerate([*stops, last]):
        parts = {s: texts[s][done[s] : stop[s]] for s in texts if stop[s] > done[s]}
        order = sorted(parts, key=lambda slot: len(parts[slot]) > 1)
        width = max(map(len, parts.values()))
        rows = [Row(slot, parts[slot], [0.0] * width) for slot in order]
        bucket = Bucket(sum(map(len, parts.values())), len(rows), width)
        frame = step_frame(
            bucket, rows, step=number, groups=groups, block_size=size,
            decode_rows=sum(len(part) == 1 for part in parts.values()),
        )  # fmt: skip
        got = np.asarray(runner.logits(frame).data)
        at = 0
        for slot in order:
            count = len(parts[slot])
            # All tokens are sampled if drafts could be verified, else W of each row.
            first = at if bucket.verifies else at + width - count
            found[slot].append(got[first : first + count])
            at += count if bucket.verifies else width
            done[slot] = stop[slot]
    for slot in texts:
        runner.submit(release_frame(slot, groups=groups, max_blocks_per_seq=12))
    return {slot: np.concatenate(found[slot]) for slot in texts}


def distance(found, expected):
    """The worst row's largest difference, relative to its largest logit."""
    errors = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
    return float(np.where(np.isnan(errors), np.inf, errors).max())


GGUF_GEMMA3 = {
    "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "layer_types": None,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
GGUF_FORMS = {
    "llama3-published": ("llama", {}),
    "llama-linear": ("llama", {}),
    "llama-yarn": ("llama", {}),
    "mistral-full": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, **rope(theta=1e4)}),
    "gemma3": ("gemma3", GGUF_GEMMA3),
    "gemma4": ("gemma4", {}),
    "gemma4-small": ("gemma4", {}),
    "gemma4-moe": ("gemma4", {}),
    "phi3": ("phi3", {}),
    "phi3-long": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "arcee": ("arcee", {}),
    "seed-oss": ("seed_oss", {}),
    "ernie4.5": ("ernie4_5", {}),
    "hunyuan": ("hunyuan-dense", {}),
    "exaone4": ("exaone4", {}),
    "exaone-moe": (
        "exaone-moe",
        {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "first_k_dense_replace": 1},
    ),
    "apertus": ("apertus", PUBLISHED | {"max_position_embeddings": 16384}),
    "gemma": ("gemma", {}),
    "ministral3": ("mistral3", {}),
    "glm4-moe": ("glm4moe", {}),
    "dots1": ("dots1", {"sliding_window": None}),
    "olmoe": ("olmoe", {}),
    "minimax-m2": ("minimax-m2", {}),
    "gpt-oss": ("gpt-oss", {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}),
}
"""Family: its ``general.architecture``, and what such files cannot say otherwise."""
