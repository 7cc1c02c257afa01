"""Random configs of every family, for a comparison with transformers."""

from __future__ import annotations

from typing import Any

VOCAB, TOKENS = 40, 22
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = "linear_attention"
CHUNKS = "chunked_attention"
ABSENT = object()
"""A drawn value: the config has no such field."""

SIZES = {
    "vocab_size": [VOCAB], "hidden_size": [16, 24], "intermediate_size": [20, 32],
    "num_hidden_layers": [2, 3], "num_attention_heads": [2, 4],
    "num_key_value_heads": [*[1, 2] * 6, None, ABSENT],
    "max_position_embeddings": [64, 64, 256, ABSENT], "pad_token_id": [0],
}  # fmt: skip
COMMON = {
    "head_dim": [8, 12, 8, 12, 8, 12, 8, None, ABSENT],
    "rms_norm_eps": [1e-5, 0.1, ABSENT],
    "hidden_act": ["silu", "silu", "gelu_pytorch_tanh", "gelu_new", "gelu", "relu",
                   "relu2", "quick_gelu", ABSENT, "mish"],
    "tie_word_embeddings": [True, False, ABSENT],
    "attention_bias": [False, False, True, ABSENT],
    "mlp_bias": [False, False, True, ABSENT],
    "sliding_window": [5, 64, None, ABSENT],
    "layer_types": [*[ABSENT, "drawn"] * 6, "short", None],
    "partial_rotary_factor": [*[ABSENT] * 6, 1.0, 0.5],
    "attention_dropout": [0.1, ABSENT], "pretraining_tp": [2, ABSENT],
    "use_cache": [False, ABSENT], "an_unknown_field": [ABSENT, {"a": 1}],
    "initializer_range": [0.5, ABSENT], "torch_dtype": ["bfloat16", ABSENT],
}  # fmt: skip
"""Fields of most families, each in a config with the probability DRAWN."""
DRAWN = 0.5

QWEN = {
    "use_sliding_window": [True, True, False, ABSENT],
    "max_window_layers": [0, 1, 2, ABSENT],
}
GEMMA4 = {
    "hidden_activation": ["gelu_pytorch_tanh", "silu", ABSENT],
    "final_logit_softcapping": [3.0, None, ABSENT],
    "use_bidirectional_attention": [None, "vision", ABSENT, "all"],
    "head_dim": [8, 12],
    "global_head_dim": [8, 16],
    "num_global_key_value_heads": [1, 2, None, ABSENT],
    "num_key_value_heads": [1, 2],
    "attention_k_eq_v": [True, False, ABSENT],
    "num_kv_shared_layers": [*[0, 1] * 3, 2, ABSENT],
    "use_double_wide_mlp": [True, False, ABSENT],
}
GEMMA = {
    "hidden_activation": ["gelu_pytorch_tanh", "silu", ABSENT],
    "query_pre_attn_scalar": [4, 9, ABSENT],
    "attn_logit_softcapping": [2.0, None, ABSENT],
    "final_logit_softcapping": [3.0, None, ABSENT],
    "use_bidirectional_attention": [False, ABSENT, ABSENT, True],
}
MOE = {
    "num_experts_per_tok": [1, 2], "moe_intermediate_size": [12],
    "norm_topk_prob": [True, False, ABSENT], "decoder_sparse_step": [1, 2, ABSENT],
    "mlp_only_layers": [[0], None, ABSENT], "qkv_bias": [True, False, ABSENT],
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": [None], "kv_lora_rank": [12], "q_lora_rank": [10, None],
    "qk_nope_head_dim": [6, 8], "qk_rope_head_dim": [4, 8], "v_head_dim": [6],
    "n_routed_experts": [4, 8], "n_shared_experts": [1, 2],
    "num_experts_per_tok": [1, 2], "moe_intermediate_size": [12],
    "first_k_dense_replace": [0, 1, 2, ABSENT], "n_group": [2],
    "topk_group": [1, 2], "routed_scaling_factor": [0.5, ABSENT],
    "head_dim": [*[ABSENT] * 6, 8, None], "scoring_func": [ABSENT, ABSENT, "softmax"],
    "norm_topk_prob": [True, False, ABSENT], "num_nextn_predict_layers": [1, ABSENT],
}  # fmt: skip
LATENTS = (
    "num_key_value_heads", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "head_dim",
)  # fmt: skip
GRANITE = {
    "embedding_multiplier": [3.0, ABSENT], "logits_scaling": [0.5, ABSENT],
    "residual_multiplier": [0.4, ABSENT], "attention_multiplier": [0.3, ABSENT],
}  # fmt: skip
INDEXED = DEEPSEEK | {
    "num_attention_heads": [4], "num_key_value_heads": [4], "q_lora_rank": [10],
    "head_dim": [*[ABSENT] * 3, 8], "index_topk": [3, 7], "index_n_heads": [8],
    "index_head_dim": [8, 12], "layer_types": [ABSENT],
    "mlp_layer_types": [["sparse", "dense", "sparse"], ["dense", "sparse"], ABSENT],
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": [1, 2], "linear_num_value_heads": [*[2, 4] * 6, 3],
    "linear_key_head_dim": [16], "linear_value_head_dim": [16],
    "linear_conv_kernel_dim": [2, 3, ABSENT],
    "full_attention_interval": [1, 2, 2, 2, 2, 3], "hidden_size": [16, 24],
    "partial_rotary_factor": [0.5, 0.25, ABSENT, 1.0],
    "layer_types": [*[ABSENT] * 6, *["drawn"] * 3, "short", None],
    # float32 has few digits of small results of gelu, which are scaled to length 1.
    "hidden_act": [*["silu"] * 8, "mish"],
}  # fmt: skip
CONVS = {
    "norm_eps": [0.1, ABSENT],
    "conv_L_cache": [2, 4, ABSENT],
    "conv_bias": [True, False, ABSENT],
    "tie_embedding": [*[ABSENT] * 3, True, False],
    "num_key_value_heads": [1, 2],
    "layer_types": [*["drawn"] * 4, ABSENT, "short"],
}
MAMBA = {
    "mamba_n_heads": [4, 4, 4, 8, 3],
    "mamba_n_groups": [1, 2],
    "mamba_d_state": [6],
    "mamba_d_head": ["auto", ABSENT, ABSENT, 8],
    "mamba_d_conv": [2, 3, ABSENT],
    "mamba_expand": [2, 3, ABSENT],
    "mamba_chunk_size": [4, 256, ABSENT],
    "mamba_conv_bias": [True, False, ABSENT],
    "mamba_proj_bias": [*[ABSENT] * 8, False, True],
    "time_step_limit": [*[ABSENT] * 8, [0.0, 0.5]],
}
FAMILIES: dict[str, dict[str, list[Any]]] = {
    "bamba": {
        **MAMBA, "attn_layer_indices": [*[[0], [1], [0, 1]] * 3, [1, 7], ABSENT],
        "head_dim": [ABSENT], "layer_types": [ABSENT], "num_attention_heads": [2],
        "num_key_value_heads": [1, 2],
    },
    "falcon_h1": {
        **MAMBA, "mamba_d_ssm": [32, 24, None], "mamba_rms_norm": [True, False, ABSENT],
        "mamba_norm_before_gate": [True, False, ABSENT], "layer_types": [ABSENT],
        "projectors_bias": [True, False, ABSENT], "key_multiplier": [0.5, ABSENT],
        "mlp_multipliers": [[0.5, 1.5], None, ABSENT, [1, 1]],
        "ssm_multipliers": [[0.5, 1.5, 0.7, 0.8, 0.9], None, ABSENT],
        "lm_head_multiplier": [0.5, ABSENT], "embedding_multiplier": [3.0, ABSENT],
        "attention_in_multiplier": [0.6, ABSENT], "ssm_in_multiplier": [0.6, ABSENT],
        "attention_out_multiplier": [0.6, ABSENT], "ssm_out_multiplier": [0.6, ABSENT],
    },
    "nemotron_h": {
        "hybrid_override_pattern": [*["M*E", "M-*", "*EM-", "-*"] * 2, "MM"],
        "layers_block_type": [
            *[ABSENT] * 4, ["linear_attention", "full_attention"],
            *[["mamba", "moe", "attention"], ["mlp", "attention"]] * 2,
            ["mamba", "conv"],
        ],
        "layer_types": [ABSENT], "head_dim": [8, 12], "mamba_num_heads": [4, 8],
        "mamba_head_dim": [6], "n_groups": [1, 2], "mamba_n_groups": [*[ABSENT] * 3, 4],
        "ssm_state_size": [6], "conv_kernel": [2, 3, ABSENT], "chunk_size": [4, ABSENT],
        "use_conv_bias": [True, False, ABSENT], "use_bias": [*[False] * 4, True],
        "time_step_min": [1e-9], "mlp_hidden_act": ["relu2", "silu", ABSENT],
        "n_routed_experts": [4, 8], "num_experts_per_tok": [1, 2],
        "moe_intermediate_size": [12], "moe_shared_expert_intermediate_size": [10],
        "moe_latent_size": [8, None, ABSENT], "n_group": [1, 2], "topk_group": [1],
        "norm_topk_prob": [True, False, ABSENT], "num_key_value_heads": [1, 2],
        "routed_scaling_factor": [0.5, ABSENT], "layer_norm_epsilon": [0.1, ABSENT],
    },
    "granitemoehybrid": {
        **MAMBA, "num_local_experts": [4, 4, 0], "num_experts_per_tok": [1, 2],
        "shared_intermediate_size": [12], "embedding_multiplier": [3.0, ABSENT],
        "residual_multiplier": [0.4, ABSENT], "attention_multiplier": [0.3, ABSENT],
        "position_embedding_type": ["rope", "nope", None, ABSENT],
        "layer_types": [*["drawn"] * 8, ABSENT, "short"], "head_dim": [ABSENT],
        "hidden_act": [*["silu"] * 6, "gelu_pytorch_tanh", "relu"],
        "partial_rotary_factor": [ABSENT],
    },
    "lfm2": {
        **CONVS, "block_auto_adjust_ff_dim": [False, True, ABSENT],
        "block_multiple_of": [4, 8], "block_ffn_dim_multiplier": [0.9, 2, None, ABSENT],
        "block_ff_dim": [*[ABSENT] * 3, 36], "full_attn_idxs": [[1], [0, 1], ABSENT],
    },
    "lfm2_moe": {
        **CONVS, "num_experts": [4], "num_experts_per_tok": [1, 2],
        "moe_intermediate_size": [12], "num_dense_layers": [0, 1, ABSENT],
        "use_expert_bias": [True, False, ABSENT], "norm_topk_prob": [False, ABSENT],
        "routed_scaling_factor": [0.5, ABSENT], "layer_types": [*["drawn"] * 6, ABSENT],
    },
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": [4], "num_experts_per_tok": [1, 2, ABSENT]},
    "qwen2": QWEN,
    "qwen3": QWEN,
    "qwen2_moe": {
        **MOE, "num_experts": [4], "shared_expert_intermediate_size": [8],
        "use_sliding_window": [False, ABSENT, True],
    },
    "qwen3_moe": {
        **MOE, "num_experts": [4], "use_sliding_window": [False, ABSENT, True],
    },
    "gemma2": GEMMA,
    "gemma3_text": {
        **GEMMA, "rope_local_base_freq": [50.0, ABSENT],
        "sliding_window_pattern": [2, 3, ABSENT],
    },
    "gemma4_text": {
        **GEMMA4,
        "hidden_size_per_layer_input": [0, 6], "vocab_size_per_layer_input": [VOCAB],
        "enable_moe_block": [True, False, ABSENT], "num_experts": [4],
        "top_k_experts": [1, 2], "moe_intermediate_size": [12],
    },
    "phi3": {"original_max_position_embeddings": [16, 32, 64, ABSENT]},
    "olmo2": {"clip_qkv": [ABSENT, ABSENT, None]},
    "olmo3": {},
    "smollm3": {
        "use_sliding_window": [True, False, ABSENT],
        "no_rope_layers": ["drawn", ABSENT, [1], None],
        "no_rope_layer_interval": [2, 3, ABSENT],
    },
    "granite": {
        "embedding_multiplier": [3.0, ABSENT], "logits_scaling": [0.5, 4.0, ABSENT],
        "residual_multiplier": [0.4, ABSENT],
        "attention_multiplier": [0.3, ABSENT],
    },
    "cwm": {},
    "stablelm": {
        "use_qkv_bias": [True, False, ABSENT], "layer_norm_eps": [0.1, ABSENT],
        "partial_rotary_factor": [0.5, 0.25, ABSENT],
        "use_parallel_residual": [*[False] * 4, ABSENT, True],
    },
    "exaone_moe": {
        "sliding_window": [5, 64, ABSENT], "sliding_window_pattern": [2, 3, ABSENT],
        "num_experts": [4], "num_experts_per_tok": [1, 2],
        "moe_intermediate_size": [12], "num_shared_experts": [1, 2, ABSENT],
        "first_k_dense_replace": [0, 1, ABSENT], "n_group": [2, 1, ABSENT],
        "topk_group": [1, ABSENT], "routed_scaling_factor": [0.5, ABSENT],
        "norm_topk_prob": [True, False, ABSENT],
    },
    "apertus": {"hidden_act": ["xielu", "xielu", "relu", "silu", ABSENT, "mish"]},
    "nemotron": {
        "norm_eps": [0.1, ABSENT], "partial_rotary_factor": [0.5, 0.25, ABSENT, 1.0],
    },
    "ministral": {},
    "helium": {},
    "glm4_moe_lite": {
        **DEEPSEEK, "rope_interleave": [True, False, ABSENT],
        "first_k_dense_replace": [1, 3, ABSENT], "num_attention_heads": [4],
        "num_key_value_heads": [4], "head_dim": [ABSENT],
        "mlp_layer_types": [["sparse", "dense", "sparse"], ABSENT],
    },
    "hunyuan_v1_moe": {"num_experts": [4], "moe_topk": [1, 2, [2, 2, 2], ABSENT]},
    "granitemoe": {
        "num_local_experts": [4], "num_experts_per_tok": [1, 2],
        "embedding_multiplier": [3.0, ABSENT], "logits_scaling": [0.5, ABSENT],
    },
    "granitemoeshared": {
        "num_local_experts": [4], "num_experts_per_tok": [1, 2],
        "residual_multiplier": [0.4, ABSENT], "shared_intermediate_size": [12, ABSENT],
    },
    "arcee": {},
    "seed_oss": {"attention_out_bias": [True, False, ABSENT]},
    "ernie4_5": {"use_bias": [True, False, ABSENT]},
    "ernie4_5_moe": {
        "moe_num_experts": [4], "moe_k": [1, 2], "moe_intermediate_size": [12],
        "moe_num_shared_experts": [1, 2, ABSENT],
        "moe_layer_start_index": [0, 1, ABSENT], "moe_layer_end_index": [-1, 1, ABSENT],
        "moe_layer_interval": [1, 2, ABSENT], "use_bias": [*[False] * 4, True],
    },
    "gpt2": {
        "n_embd": [16, 24], "n_layer": [2], "n_head": [2, 4],
        "n_positions": [64, 256, ABSENT], "n_inner": [20, None, ABSENT],
        "activation_function": ["gelu_new", "relu", ABSENT],
        "layer_norm_epsilon": [0.1, ABSENT],
        "scale_attn_weights": [True, False, ABSENT],
        "reorder_and_upcast_attn": [True, ABSENT],
        "scale_attn_by_inverse_layer_idx": [*[ABSENT] * 4, False, True],
    },
    "gpt_bigcode": {
        "n_embd": [16, 24], "n_layer": [2], "n_head": [2, 4], "n_inner": [20, ABSENT],
        "n_positions": [64, 256, ABSENT], "multi_query": [True, False, ABSENT],
        "scale_attn_weights": [True, False, ABSENT], "layer_norm_epsilon": [0.1],
        "activation_function": ["gelu_pytorch_tanh", "relu", ABSENT],
    },
    "gpt_neo": {
        "num_layers": [2], "num_heads": [2, 4], "window_size": [5, 64, ABSENT],
        "attention_types": [
            [[["global", "local"], 1]], [[["local"], 2]], [[["global"], 2]],
            [[["global", "other"], 1]],
        ], "layer_norm_epsilon": [0.1, ABSENT],
        "activation_function": ["gelu_new", "relu", ABSENT],
    },
    "gptj": {
        "n_embd": [16, 24], "n_layer": [2], "n_head": [2], "n_inner": [20, ABSENT],
        "rotary_dim": [4, 8], "layer_norm_epsilon": [0.1, ABSENT],
        "activation_function": ["gelu_new", "relu", ABSENT],
    },
    "codegen": {
        "n_embd": [16, 32], "n_layer": [2], "n_head": [4], "n_inner": [20, ABSENT],
        "rotary_dim": [4], "layer_norm_epsilon": [0.1, ABSENT],
    },
    "opt": {
        "ffn_dim": [20], "activation_function": ["relu", "gelu", ABSENT],
        "do_layer_norm_before": [*[True] * 4, False, ABSENT],
        "word_embed_proj_dim": [*[ABSENT] * 6, 8], "enable_bias": [True, ABSENT],
    },
    "falcon": {
        "new_decoder_architecture": [True, False, ABSENT], "num_kv_heads": [1, 2, None],
        "multi_query": [True, False, ABSENT], "parallel_attn": [True, True, False],
        "bias": [True, False, ABSENT], "alibi": [*[False] * 4, True],
        "ffn_hidden_size": [20, ABSENT], "layer_norm_epsilon": [0.1, ABSENT],
        "num_ln_in_parallel_attn": [1, 2, *[ABSENT] * 4],
        "activation": ["gelu", "relu", ABSENT], "head_dim": [ABSENT],
    },
    "youtu": {
        **{name: DEEPSEEK[name] for name in LATENTS},
        "rope_interleave": [True, False, ABSENT], "num_attention_heads": [4],
        "num_key_value_heads": [4], "head_dim": [ABSENT],
    },
    "minicpm3": {
        **{name: DEEPSEEK[name] for name in LATENTS}, "scale_emb": [3, ABSENT],
        "scale_depth": [0.5, None, ABSENT], "dim_model_base": [8, None, ABSENT],
    },
    "axk1": {
        **DEEPSEEK, "first_k_dense_replace": [0, 1, ABSENT], "q_lora_rank": [10],
        "num_attention_heads": [4], "num_key_value_heads": [4], "head_dim": [ABSENT],
        "mlp_layer_types": [["sparse", "dense", "sparse"], ABSENT],
    },
    "hyperclovax": {**GRANITE, "use_post_norm": [True, False, ABSENT]},
    "granite_swa": {
        **GRANITE, "sliding_window": [5, 64, ABSENT],
        "layer_rope_theta": [[50.0, 0], [0, 0, 9], [90.0, 5.0, 90.0], None, ABSENT],
    },
    "granitemoe_swa": {
        **GRANITE, "num_local_experts": [4], "num_experts_per_tok": [1, 2],
        "shared_intermediate_size": [12, ABSENT], "sliding_window": [5, ABSENT],
        "layer_rope_theta": [[50.0, 0], [0, 0, 9], None, ABSENT],
    },
    "flex_olmo": {
        "num_experts": [4], "num_experts_per_tok": [1, 2],
        "norm_topk_prob": [True, False, ABSENT], "head_dim": [ABSENT],
    },
    "hy_v3": {
        "num_experts": [4], "num_experts_per_tok": [1, 2],
        "moe_intermediate_size": [12], "num_shared_experts": [1, 2, ABSENT],
        "router_scaling_factor": [0.5, ABSENT], "head_dim": [8, 12],
        "mlp_layer_types": [["sparse", "dense", "sparse"], ABSENT],
        "num_key_value_heads": [1, 2],
    },
    "flint": {
        "num_experts": [4], "num_experts_per_tok": [1, 2],
        "moe_intermediate_size": [12], "shared_expert_intermediate_size": [8],
        "norm_topk_prob": [True, False, ABSENT], "num_key_value_heads": [1, 2],
        "mlp_only_layers": [[0], [], ABSENT], "sliding_window": [5, 64, ABSENT],
        "head_dim": [8, 12], "decoder_sparse_step": [1, 2, ABSENT],
    },
    "mellum": {
        "num_experts": [4], "num_experts_per_tok": [1, 2],
        "moe_intermediate_size": [12], "norm_topk_prob": [True, False, ABSENT],
        "sliding_window": [5, 64, ABSENT], "head_dim": [8, 12],
        "mlp_layer_types": [["sparse", "dense", "sparse"], ABSENT],
        "num_key_value_heads": [1, 2],
    },
    "nanochat": {
        "final_logit_softcapping": [3.0, None, ABSENT], "head_dim": [8, 12, ABSENT],
        "hidden_act": ["relu2", "relu", "silu", ABSENT],
    },
    "gemma3n_text": {
        "hidden_activation": ["gelu_pytorch_tanh", ABSENT, "silu"],
        "final_logit_softcapping": [3.0, None, ABSENT], "head_dim": [8, 12],
        "intermediate_size": [20, 20, [20, 24], [20, 24, 16]],
        "num_key_value_heads": [1, 2], "num_kv_shared_layers": [*[0, 1] * 3, 2],
        "hidden_size_per_layer_input": [6], "vocab_size_per_layer_input": [VOCAB, 30],
        "altup_num_inputs": [2, 3, ABSENT], "altup_active_idx": [0, 1, ABSENT],
        "altup_correct_scale": [True, False, ABSENT], "laurel_rank": [5, ABSENT],
        "activation_sparsity_pattern": [[0.5, 0.0], [0.9, 0.2, 0.0], None, ABSENT],
        "rope_local_base_freq": [50.0, ABSENT], "altup_coef_clip": [0.1, ABSENT],
        "sliding_window": [5, 64, ABSENT],
    },
    "gemma4_unified_text": GEMMA4,
    "biogpt": {
        "scale_embedding": [True, False, ABSENT], "layer_norm_eps": [0.1, ABSENT],
        "hidden_act": ["gelu", "relu", ABSENT],
    },
    "persimmon": {
        "layer_norm_eps": [0.1, ABSENT], "qk_layernorm": [True, False, ABSENT],
        "partial_rotary_factor": [0.5, ABSENT, 1.0], "head_dim": [ABSENT],
        "hidden_act": ["relu2", "gelu", ABSENT],
    },
    "afmoe": {
        "num_experts": [4], "num_experts_per_tok": [1, 2], "head_dim": [8, 12],
        "moe_intermediate_size": [12], "num_shared_experts": [1, 2, ABSENT],
        "num_dense_layers": [0, 1, ABSENT], "route_scale": [0.5, ABSENT],
        "mup_enabled": [True, False, ABSENT], "sliding_window": [5, 64, ABSENT],
        "global_attn_every_n_layers": [2, 3, ABSENT],
    },
    "cohere2_moe": {
        "num_experts": [4], "num_experts_per_tok": [1, 2], "head_dim": [8, 12],
        "num_shared_experts": [0, 1, 2, ABSENT], "logit_scale": [0.3, ABSENT],
        "shared_expert_combination_strategy": ["sum", "average", ABSENT],
        "expert_selection_fn": ["softmax", "sigmoid", ABSENT],
        "norm_topk_prob": [True, False, ABSENT], "layer_norm_eps": [0.1, ABSENT],
        "first_k_dense_replace": [0, 1, ABSENT], "rms_norm_eps": [*[ABSENT] * 5, 0.1],
        "prefix_dense_intermediate_size": [14, None, ABSENT],
        "prefix_dense_sliding_window_pattern": [1, 2, ABSENT],
        "sliding_window_pattern": [2, ABSENT], "sliding_window": [5, 64, ABSENT],
        "mlp_layer_types": [["sparse", "dense"], ABSENT, ABSENT],
    },
    "jais2": {"layer_norm_eps": [0.1, ABSENT]},
    "vaultgemma": GEMMA,
    "gpt_neox": {
        "use_parallel_residual": [True, False, ABSENT], "head_dim": [ABSENT],
        "rotary_pct": [0.5, 1.0, ABSENT], "rotary_emb_base": [300, ABSENT],
        "layer_norm_eps": [0.1, ABSENT], "partial_rotary_factor": [ABSENT],
    },
    "phi": {
        "partial_rotary_factor": [0.5, ABSENT, 1.0], "layer_norm_eps": [0.1, ABSENT],
        "qk_layernorm": [*[ABSENT] * 4, False, True],
    },
    "olmo": {"clip_qkv": [0.3, 2.0, ABSENT, None]},
    "olmoe": {"num_experts": [4], "num_experts_per_tok": [1, 2],
              "norm_topk_prob": [True, ABSENT], "head_dim": [ABSENT]},
    "gemma": {},
    "glm": {"partial_rotary_factor": [0.5, 0.25, ABSENT, 1.0]},
    "gpt_oss": {
        "num_local_experts": [4], "num_experts_per_tok": [1, 2],
        "swiglu_limit": [1.0, 3.0, ABSENT], "swiglu_alpha": [1.2, ABSENT],
    },
    "deepseek_v2": {
        **DEEPSEEK, "norm_topk_prob": [*[False] * 4, ABSENT, True],
        "topk_method": ["greedy", "group_limited_greedy", "group_limited_greedy",
                        ABSENT, "noaux_tc"],
    },
    "deepseek_v3": {
        **DEEPSEEK, "rope_interleave": [True, False, ABSENT],
        "scoring_func": [ABSENT, "sigmoid"],
    },
    "deepseek_v32": INDEXED | {"index_n_heads": [8, 16]},
    "glm_moe_dsa": INDEXED | {
        "index_topk_freq": [1, 2, ABSENT], "index_skip_topk_offset": [1, ABSENT],
        "indexer_types": [ABSENT, ["full", "shared", "shared"], ["full", "full"]],
        "index_topk_pattern": [ABSENT, "FSF", "FS", ["full", "shared"]],
    },
    "cohere": {
        "logit_scale": [0.5, ABSENT], "layer_norm_eps": [0.1, ABSENT],
        "use_qk_norm": [*[False] * 4, ABSENT, True],
    },
    "cohere2": {
        "logit_scale": [0.5, ABSENT], "layer_norm_eps": [0.1, ABSENT],
        "sliding_window_pattern": [2, 3, ABSENT], "sliding_window": [5, 64, ABSENT],
    },
    "llama4_text": {
        "intermediate_size_mlp": [24], "num_local_experts": [4],
        "num_experts_per_tok": [1, 2], "moe_layers": [[0], [], None, *[ABSENT] * 3],
        "interleave_moe_layer_step": [1, 2, ABSENT],
        "no_rope_layers": ["drawn", ABSENT, [], None],
        "no_rope_layer_interval": [2, 3, ABSENT], "use_qk_norm": [True, False, ABSENT],
        "attention_chunk_size": [8, 12, 64, ABSENT, None],
        "attn_temperature_tuning": [True, False, ABSENT], "floor_scale": [4, 5, ABSENT],
        "attn_scale": [0.3, ABSENT], "layer_types": [*[ABSENT] * 6, "chunks", "drawn"],
    },
    "starcoder2": {
        "use_bias": [True, False, ABSENT], "norm_epsilon": [0.1, ABSENT],
    },
    "glm4": {"partial_rotary_factor": [0.5, 0.25, ABSENT, 1.0]},
    "qwen3_next": {
        **DELTA, **MOE, "num_experts": [4], "shared_expert_intermediate_size": [8],
    },
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {
        **DELTA, "num_experts": [4], "shared_expert_intermediate_size": [8],
        "num_experts_per_tok": [1, 2], "moe_intermediate_size": [12],
    },
}  # fmt: skip
ALWAYS = (
    "num_local_experts", "num_experts", "moe_intermediate_size", "num_experts_per_tok",
    "shared_expert_intermediate_size", "intermediate_size_mlp", "moe_num_experts",
    "moe_k", "n_embd", "n_layer", "n_head", "num_layers", "num_heads", "rotary_dim",
    "attention_types", "ffn_dim", "global_head_dim", "top_k_experts",
    "hidden_size_per_layer_input", "vocab_size_per_layer_input",
    *DEEPSEEK.keys() - {"norm_topk_prob"},
    "mamba_n_heads", "mamba_d_state", "mamba_d_ssm", "hybrid_override_pattern",
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "time_step_min",
    "n_routed_experts", "moe_shared_expert_intermediate_size", "attn_layer_indices",
    "shared_intermediate_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "full_attention_interval",
)  # fmt: skip
"""Fields that keep a model small, drawn in every config."""
OTHERS = {
    "granitemoehybrid": LINEAR, "lfm2": "conv", "lfm2_moe": "conv",
    "qwen3_next": LINEAR, "qwen3_5_text": LINEAR, "qwen3_5_moe_text": LINEAR,
}  # fmt: skip
"""What a drawn layer is that has no full attention; windows by default."""
MIXED = 0.8
"""Probability that a drawn hybrid surely has a layer with full attention."""
RENAMED = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen"), (
        "hidden_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    )),
    "gpt_neo": ("num_hidden_layers", "num_attention_heads"),
}  # fmt: skip
"""Fields that have other names in a config of a family."""


def draw(rng, family: str) -> dict[str, Any]:
    """A config of a family; ``rng`` is a ``random.Random``."""
    config: dict[str, Any] = {"model_type": family}
    for name, values in SIZES.items():
        config[name] = rng.choice(values)
    extra = FAMILIES[family]
    for name, values in {**COMMON, **extra}.items():
        if name in ALWAYS or rng.random() < (0.7 if name in extra else DRAWN / 2):
            config[name] = rng.choice(values)
    layers = config["num_hidden_layers"]
    if config.get("layer_types") == "drawn":
        other = OTHERS.get(family, SLIDING)
        config["layer_types"] = [rng.choice([other, FULL]) for _ in range(layers)]
        if family in OTHERS and rng.random() < MIXED:
            config["layer_types"][rng.randrange(layers)] = FULL
    elif config.get("layer_types") == "chunks":
        config["layer_types"] = [rng.choice([CHUNKS, FULL]) for _ in range(layers)]
    elif config.get("layer_types") == "short":
        config["layer_types"] = [FULL]
    if config.get("no_rope_layers") == "drawn":
        config["no_rope_layers"] = [rng.choice([0, 1]) for _ in range(layers)]
    lanes = config.get("head_dim") or ABSENT
    if lanes is ABSENT:
        lanes = config["hidden_size"] // config["num_attention_heads"]
    config |= rope(rng, family, lanes)
    config |= dict.fromkeys(RENAMED.get(family, ()), ABSENT)
    return {name: value for name, value in config.items() if value is not ABSENT}


def rope(rng, family, lanes):
    """Fields of the rotation, in any of the places where configs have them."""
    if family in ("gemma4_text", "gemma4_unified_text"):
        return by_layers(rng)
    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["rope_theta"] = rng.choice([100.0, 5000.0, 1e6])
    if rng.random() < 0.15:
        found["original_max_position_embeddings"] = rng.choice([8, 16, 32])
    place = rng.choice(["", "rope_parameters", "rope_scaling", "both"])
    if place in ("rope_parameters", "both"):
        theta = rng.choice([{}, {"rope_theta": 300.0}])
        kind = scaling(rng, family, lanes) if place != "both" else {}
        found["rope_parameters"] = {"rope_type": "default", **theta, **kind}
        if family in ("gemma3_text", "gemma3n_text", "olmo3", "mellum"):
            found["rope_parameters"] = {
                FULL: found["rope_parameters"],
                SLIDING: {"rope_type": "default", "rope_theta": 30.0},
            }
    if place in ("rope_scaling", "both"):
        found["rope_scaling"] = scaling(rng, family, lanes)
    return found


def by_layers(rng):
    """Fields of the rotation of each kind of layers, or none."""
    share = {"partial_rotary_factor": rng.choice([0.25, 0.5, 1.0])}
    kinds = {"rope_type": "proportional", "rope_theta": 5e3}, {"rope_type": "default"}
    theta, full = rng.choice([{}, {"factor": 2.0}]), rng.choice(kinds)
    if full["rope_type"] == "proportional":
        full = {**full, **share, **theta}
    local = {"rope_type": "default", "rope_theta": 300.0}
    nested = {FULL: {"rope_theta": 900.0, **full}, SLIDING: local}
    return {"rope_parameters": nested} if rng.random() < 0.7 else {}


def scaling(rng, family, lanes):
    """Fields of one kind of scaling, of which any may be missing."""
    kinds = ["default", "linear", "llama3", "yarn", "yarn", "yarn", "dynamic"]
    if family == "phi3":
        kinds = ["default", "longrope", "longrope", "longrope", "su"]
    kind = rng.choice(kinds) if rng.random() < 0.97 else "mrope"
    name = rng.choice(["rope_type", "rope_type", "type"])
    values: dict[str, list[Any]] = {
        "factor": [2.0, 4.0, 8],
        "original_max_position_embeddings": [8, 16, 32],
    }
    if kind == "llama3":
        values |= {"low_freq_factor": [1.0], "high_freq_factor": [4.0, 2.0]}
    if kind == "yarn":
        optional = {
            "beta_fast": [32, 8.0], "beta_slow": [1, 2.0], "attention_factor": [1.3],
            "mscale": [1.0, 0.7], "mscale_all_dim": [1.0, 0.5], "truncate": [False],
        }  # fmt: skip
        values |= {key: each for key, each in optional.items() if rng.random() < 0.4}
    if kind in ("longrope", "su"):
        half = lanes // 2
        values = {
            "short_factor": [[1.0 + 0.3 * i for i in range(half)]],
            "long_factor": [[2.0 + i for i in range(half)]],
        }
        if rng.random() < 0.3:
            values |= {"attention_factor": [1.2], "factor": [4.0]}
    if kind == "default":
        values = {}
    fields = {key: rng.choice(each) for key, each in values.items()}
    if fields and rng.random() < 0.15:
        fields.pop(rng.choice(sorted(fields)))
    if rng.random() < 0.1:
        fields["of_no_meaning"] = 1
    return {name: kind, **fields}
