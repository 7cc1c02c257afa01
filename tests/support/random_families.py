"""Random checkpoints of every family: its fields, and the tensors that it declares."""

from __future__ import annotations

import numpy as np

from inl.spec.tree import leaves
from inl.testing.tiny import MemoryCheckpoint
from inl.weights.sources import stored_tensors

PLAIN = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rope_theta": 500.0,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0]}
SPLIT = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 6,
    "n_shared_experts": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "num_key_value_heads": None,
}  # fmt: skip
INDEXED = {
    "num_key_value_heads": 6, "index_topk": 9, "index_n_heads": 8, "index_head_dim": 12,
}  # fmt: skip
SIGMOID = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "n_group": 3, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
DELTA = {
    "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5, "head_dim": 16,
}  # fmt: skip
CONVS = {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16}
MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
}  # fmt: skip
FIELDS = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA | {
        "mamba_d_ssm": 96, "mamba_rms_norm": True, "attention_in_multiplier": 0.7,
        "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2], "mlp_multipliers": [0.8, 1.2],
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-E", "head_dim": 12, "mamba_num_heads": 6,
        "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
        "n_routed_experts": 4, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 16,
    },
    "granite_hybrid": MAMBA | {
        "layer_types": ["mamba", "attention"] * 2, "residual_multiplier": 0.5,
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
    "lfm2": CONVS,
    "lfm2_moe": CONVS | {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "num_dense_layers": 1,
    },
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7},
    "qwen2": SPLIT,
    "qwen2_moe": SPARSE | {"shared_expert_intermediate_size": 24},
    "qwen3": SPLIT | {"head_dim": 16},
    "qwen3_moe": SPARSE | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "gemma2": {"sliding_window": 7, "head_dim": 16},
    "gemma3": {"sliding_window": 7, "head_dim": 16, "sliding_window_pattern": 2},
    "gemma4": {
        "sliding_window": 7, "head_dim": 16, "global_head_dim": 24,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "phi3": {
        "partial_rotary_factor": 0.75, "rope_scaling": LONG, "sliding_window": 7,
        "original_max_position_embeddings": 64,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 7},
    "smollm3": {"use_sliding_window": True, "sliding_window": 7},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "glm": {"head_dim": 12},
    "glm4": {"head_dim": 12},
    "gpt_oss": {
        "head_dim": 12, "sliding_window": 7, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "llama4": {
        "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 4,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2, "attention_chunk_size": 16, "floor_scale": 5,
    },
    "cohere": {},
    "cohere2": {"sliding_window": 7},
    "starcoder2": {"sliding_window": 7, "tie_word_embeddings": False},
    "qwen3_next": DELTA | SPARSE | {"shared_expert_intermediate_size": 24},
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA | SPARSE | {"shared_expert_intermediate_size": 24},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA | {"n_group": 3, "topk_group": 2},
    "deepseek_v32": MLA | INDEXED | {"n_group": 3, "topk_group": 2},
    "glm_moe_dsa": MLA | INDEXED | {"indexer_types": ["full", "shared"] * 2},
    "arcee": {"mlp_bias": True},
    "dots1": SIGMOID | {"sliding_window": 7, "max_window_layers": 2},
    "ernie4_5": {"head_dim": 12, "use_bias": True},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
    "gemma1": {"head_dim": 16},
    "exaone_moe": {
        "head_dim": 12, "sliding_window": 7, "sliding_window_pattern": 2,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    },
    "glm4_moe": SIGMOID | {"head_dim": 12, "use_qk_norm": True},
    "hunyuan_v1_dense": {},
    "minimax_m2": {"head_dim": 12, "rotary_dim": 6, "num_local_experts": 6,
                   "num_experts_per_tok": 2},
    "ministral3": {
        "head_dim": 12, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
            "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.7,
        },
    },
    "cwm": {"head_dim": 12, "sliding_window": 7},
    "glm4_moe_lite": MLA | {"num_key_value_heads": 6},
    "granite_moe": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.5,
        "shared_intermediate_size": 24,
    },
    "helium": {"head_dim": 8},
    "hunyuan_v1_moe": {"num_experts": 6, "moe_topk": 2},
    "ministral": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "nemotron": {"head_dim": 12, "mlp_bias": True},
    "apertus": {"head_dim": 12, "attention_bias": True},
    "stablelm": {"use_qkv_bias": True, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "ernie4_5_moe": {
        "head_dim": 12, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24,
    },
    "gpt2": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_bigcode": {}, "jais2": {}, "opt": {"ffn_dim": 80}, "gptj": {"rotary_dim": 4},
    "gpt_neo": {"window_size": 7},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "vaultgemma": {"sliding_window": 7, "head_dim": 16},
    "solar_open": SIGMOID | {"head_dim": 12},
    "phi": {},
    "olmo": {"clip_qkv": 2.0},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "paddleocr_vl": {
        "head_dim": 16, "use_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3],
        },
    },
    "youtu": {name: MLA[name] for name in (*MLA,)[:5]} | {"num_key_value_heads": 6},
    "minicpm3": {name: MLA[name] for name in (*MLA,)[:5]}
    | {"num_key_value_heads": 6, "scale_emb": 3, "dim_model_base": 24},
    "axk1": MLA | {"n_group": 3, "topk_group": 2, "num_key_value_heads": 6},
    "hyperclovax": {"residual_multiplier": 0.5, "logits_scaling": 0.5},
    "granite_swa": {"layer_rope_theta": [500, 0, 50, 500], "sliding_window": 7},
    "granite_moe_swa": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
        "shared_intermediate_size": 24, "attention_multiplier": 0.3,
    },
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "hy_v3": {
        "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "flint": {
        "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
        "sliding_window": 7, "mlp_only_layers": [1],
    },
    "mellum": {
        "head_dim": 12, "rope_theta": None, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "nanochat": {"head_dim": 12},
    "gemma3n": {
        "sliding_window": 7, "head_dim": 16, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
        "altup_num_inputs": 3, "laurel_rank": 12,
        "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.5],
    },
    "gemma4_unified": {
        "sliding_window": 7, "head_dim": 16, "global_head_dim": 24,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "biogpt": {}, "persimmon": {"num_key_value_heads": None},
    "afmoe": {
        "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cohere2_moe": {
        "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
        "num_shared_experts": 1, "sliding_window": 7, "first_k_dense_replace": 1,
        "sliding_window_pattern": 2,
    },
    "seed_oss": {"head_dim": 12, "attention_out_bias": True},
}  # fmt: skip


def drawn(model, hf, rng):
    """Tensors by their stored names, large enough that every term matters."""
    tensors = {}
    for group in leaves(model.weights(model.config(hf))):
        for param in group.params.values():
            for name, shape in stored_tensors(param).items():
                values = rng.standard_normal(shape)
                if len(shape) > 1:
                    values = 1.4 * values / shape[-1] ** 0.5
                elif name.endswith("bias"):
                    values = 0.3 * values
                elif "norm" in name:
                    values = 1 - param.offset + 0.3 * values
                tensors.setdefault(name, values.astype(np.float32))
    return tensors


def random_family(model, name, **changes):
    """A checkpoint of a model with the name of its module, the same each time."""
    hf = {**PLAIN, **FIELDS[name], **changes}
    return MemoryCheckpoint(hf, drawn(model, hf, np.random.default_rng(len(name))))
