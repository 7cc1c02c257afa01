"""Configs of every family: fields that are read, and errors that name a field."""

from __future__ import annotations

import pytest

from inl.errors import CheckpointError
from inl.models import (
    bamba,
    falcon_h1,
    gemma2,
    gemma3,
    gemma4,
    granite_hybrid,
    lfm2,
    lfm2_moe,
    llama,
    mistral,
    nemotron_h,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from inl.models.views import View
from inl.ops.rope import RopeScaling
from inl.spec.cache import Paged

PLAIN = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5]}


def test_a_window_in_some_layers_makes_two_cache_groups():
    config = gemma2.config({**PLAIN, "sliding_window": 7})
    assert config.views == (View(7, 0), View(None, 1)) * 2
    assert gemma2.MODEL.state(config) == (
        Paged((0, 2), 2, 256, "float32", 7),
        Paged((1, 3), 2, 256, "float32"),
    )


def test_a_window_in_every_layer_is_one_group():
    config = mistral.config({**PLAIN, "sliding_window": 7})
    assert mistral.MODEL.state(config) == (Paged((0, 1, 2, 3), 2, 8, "float32", 7),)


@pytest.mark.parametrize("window", [None, 64, 4096])
def test_a_window_as_long_as_the_context_is_none(window):
    config = mistral.config({**PLAIN, "sliding_window": window})
    assert config.views == (View(),) * 4


@pytest.mark.parametrize("family", [qwen2, qwen3])
def test_qwens_windows_are_in_the_later_layers(family):
    fields = {"sliding_window": 7, "max_window_layers": 3}
    assert family.config({**PLAIN, **fields}).views == (View(),) * 4
    config = family.config({**PLAIN, **fields, "use_sliding_window": True})
    assert [view.window for view in config.views] == [None] * 3 + [7]


def test_gemma3_reads_old_and_new_fields_alike():
    old = {
        "rope_theta": 2e5, "rope_local_base_freq": 3e3, "sliding_window": 7,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
    }  # fmt: skip
    new = {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
            SLIDING: {"rope_type": "default", "rope_theta": 3e3},
        },
        "layer_types": [SLIDING, FULL] * 2,
        "sliding_window": 7,
    }
    config = gemma3.config({**PLAIN, **old})
    assert config == gemma3.config({**PLAIN, **new})
    assert config.rope_scaling == RopeScaling("linear", 8.0)
    assert (config.rope_theta, config.local_rope) == (2e5, (3e3, RopeScaling()))


def test_gemma_defaults_are_those_of_its_published_configs():
    config = gemma3.config({**PLAIN, "sliding_window": 7})
    assert (config.rope_theta, config.local_rope[0]) == (1e6, 1e4)
    assert config.attention_scale == 256**-0.5
    assert (config.tied, config.head_dim, config.activation) == (True, 256, "gelu_tanh")
    assert (config.attention_cap, config.logit_cap) == (None, None)
    config = gemma2.config({**PLAIN, "sliding_window": 7})
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    uncapped = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = gemma2.config({**PLAIN, "sliding_window": 7, **uncapped})
    assert (config.attention_cap, config.logit_cap) == (None, None)


def test_longrope_serves_the_context_trained_on():
    fields = {"max_position_embeddings": 4096, "original_max_position_embeddings": 64}
    config = phi3.config({**PLAIN, **fields, "rope_scaling": LONG})
    assert config.max_tokens == 64
    assert config.rope_scaling.divisors == (1.0, 1.5, 2.0, 2.5)
    assert config.rope_scaling.gain == pytest.approx(2**0.5)


def yarn(**fields):
    given = {"factor": 4.0, "original_max_position_embeddings": 32, **fields}
    return {"rope_scaling": {"rope_type": "yarn", **given}}


MAMBA = {"mamba_n_heads": 6, "mamba_d_state": 8, "layer_types": ["mamba", FULL] * 2}
ATTENDING = {"attn_layer_indices": [1], "mamba_n_heads": 6}
REFUSED = [
    (lfm2, {"layer_types": ["conv"] * 4}, ["'layer_types'", "no full_attention"]),
    (lfm2, {"layer_types": ["mamba"] * 4}, ["'layer_types'", "mamba", "conv"]),
    (lfm2, {"full_attn_idxs": "all"}, ["'full_attn_idxs'", "'all'", "layer numbers"]),
    (lfm2, {"conv_L_cache": 1}, ["'conv_L_cache'", "1", "2 or more"]),
    (lfm2_moe, {}, ["'layer_types'", "None", "list of 4"]),
    (bamba, {"mamba_n_heads": 6}, ["'attn_layer_indices'", "no full_attention"]),
    (
        bamba,
        ATTENDING | {"mamba_proj_bias": True},
        ["'mamba_proj_bias'", "true", "false"],
    ),
    (bamba, ATTENDING | {"mamba_d_head": 15}, ["'mamba_d_head'", "15", "16"]),
    (
        granite_hybrid,
        MAMBA | {"time_step_limit": [0.0, 0.5]},
        ["'time_step_limit'", "0.5", "Infinity"],
    ),
    (
        granite_hybrid,
        MAMBA | {"mamba_n_heads": 5},
        ["'mamba_n_heads'", "5", "a divisor of 96"],
    ),
    (
        falcon_h1,
        {"mamba_n_heads": 8, "mlp_multipliers": [1.0]},
        ["'mlp_multipliers'", "[1.0]", "2 numbers"],
    ),
    (nemotron_h, {}, ["'hybrid_override_pattern'", "linear_attention"]),
    (
        nemotron_h,
        {"hybrid_override_pattern": "M*x"},
        ["'hybrid_override_pattern'", "'x'", "full_attention"],
    ),
    (
        nemotron_h,
        {"hybrid_override_pattern": "M*", "use_bias": True},
        ["'use_bias'", "true", "false"],
    ),
    (llama, {"rope_scaling": {"type": "mrope"}}, ["rope_type", "'mrope'", "yarn"]),
    (llama, {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
    (llama, yarn(factor="long"), ["'factor'", "'long'", "number"]),
    (
        llama,
        yarn(original_max_position_embeddings=None),
        ["'rope_scaling.original_max_position_embeddings'", "missing", "integer"],
    ),
    (llama, {"rope_parameters": {FULL: {}}}, ["'rope_parameters'", "every layer"]),
    (
        gemma3,
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        ["'rope_scaling.type'", "'linear'", "rope_type"],
    ),
    (
        gemma3,
        {"rope_parameters": {"rope_type": "default"}},
        ["'rope_parameters'", "rope_type", FULL, SLIDING],
    ),
    (llama, {"rope_scaling": {"rope_type": 3}}, ["rope_type", "3", "default"]),
    (llama, {"rope_scaling": [1]}, ["'rope_scaling'", "[1]", "object"]),
    (llama, {"partial_rotary_factor": 0.5}, ["'partial_rotary_factor'", "0.5", "1.0"]),
    (
        llama,
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        ["'partial_rotary_factor'", "0.5", "1.0"],
    ),
    (llama, yarn(truncate=0), ["'truncate'", "0", "true or false"]),
    (llama, yarn(beta_fast="fast"), ["'beta_fast'", "'fast'", "number"]),
    (mistral, {"sliding_window": 0}, ["'sliding_window'", "0", "1 or more"]),
    (mistral, {"sliding_window": "all"}, ["'sliding_window'", "'all'", "integer"]),
    (mistral, {"layer_types": [FULL] * 4}, ["'layer_types'", "full_attention", "null"]),
    (qwen2, {"use_sliding_window": 1}, ["'use_sliding_window'", "1", "true or false"]),
    (
        qwen2,
        {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
        ["'sliding_window'", "missing", "integer"],
    ),
    (mistral, {"attention_bias": True}, ["'attention_bias'", "true", "false"]),
    (qwen3, {"mlp_bias": True}, ["'mlp_bias'", "true", "false"]),
    (olmo2, {"clip_qkv": 8.0}, ["'clip_qkv'", "8.0", "null"]),
    (gemma2, {"sliding_window": None}, ["'sliding_window'", "missing"]),
    (gemma2, {"hidden_activation": "relu"}, ["'hidden_activation'", '"relu"', "gelu"]),
    (gemma2, {"final_logit_softcapping": -1}, ["'final_logit_softcapping'", "-1", "0"]),
    (gemma2, {"attn_logit_softcapping": "no"}, ["'attn_logit_softcapping'", "'no'"]),
    (gemma2, {"layer_types": [FULL]}, ["'layer_types'", "['full_attention']", "4"]),
    (
        gemma3,
        {"layer_types": [FULL, FULL, "chunked_attention", FULL]},
        ["'layer_types[2]'", "'chunked_attention'", SLIDING, FULL],
    ),
    (
        gemma3,
        {"use_bidirectional_attention": True},
        ["'use_bidirectional_attention'", "true", "false"],
    ),
    (gemma3, {"query_pre_attn_scalar": 0}, ["'query_pre_attn_scalar'", "0"]),
    (
        gemma4,
        {"per_layer_config": {"3": {"head_dim": 24}, "1": {"head_dim": 16}}},
        ["'per_layer_config'", "24", "alike"],
    ),
    (
        gemma4,
        {"rope_parameters": {FULL: {"rope_type": "yarn"}}},
        [f"'rope_parameters.{FULL}'", "yarn", "proportional"],
    ),
    (
        gemma4,
        {"num_kv_shared_layers": 4},
        ["'num_kv_shared_layers'", "4", "one with a cache"],
    ),
    (
        gemma4,
        {"attention_k_eq_v": True, "num_global_key_value_heads": 5},
        ["'num_global_key_value_heads'", "5", "divisor"],
    ),
    (
        gemma4,
        {
            "enable_moe_block": True,
            "num_experts": 2,
            "top_k_experts": 3,
            "moe_intermediate_size": 8,
        },
        ["'top_k_experts'", "3", "at most num_experts, 2"],
    ),
    (gemma4, {"vocab_size_per_layer_input": 3}, ["'vocab_size_per_layer_input'", "3"]),
    (gemma4, {"use_bidirectional_attention": "all"}, ["'use_bidirectional_a", "all"]),
    (phi3, {"rope_scaling": {"type": "linear"}}, ["rope_type", "'linear'", "longrope"]),
    (phi3, {"partial_rotary_factor": 1.5}, ["'partial_rotary_factor'", "1.5", "8"]),
    (phi3, {"partial_rotary_factor": 0.4}, ["'partial_rotary_factor'", "0.4", "8"]),
    (
        phi3,
        {"rope_scaling": {**LONG, "short_factor": [1.0]}},
        ["short_factor", "[1.0]", "4 numbers"],
    ),
    (
        phi3,
        {"rope_scaling": {**LONG, "short_factor": [1.0, 1.0, 1.0, -1.0]}},
        ["short_factor", "4 numbers above 0"],
    ),
]


@pytest.mark.parametrize(("family", "fields", "parts"), REFUSED)
def test_unknown_config_values_are_named(family, fields, parts):
    with pytest.raises(CheckpointError, match=r"accepted|expected") as caught:
        family.config({**PLAIN, "sliding_window": 7, **fields})
    for part in parts:
        assert part in str(caught.value)
