"""GLM-4-9B (Zhipu, 2024): Llama with adjacent lanes of which half rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import blocks, groups, llama, mlp
from inl.models.config import refuse_unless
from inl.models.fields import with_defaults
from inl.models.rope import rope_fields

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    return replace(llama.partly_rotated(hf, rope_fields(hf)), out_bias=False)


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    return llama.Layer(
        blocks.Attention(
            groups.norm(f"{at}input_layernorm", c.hidden_size),
            groups.qkv(c, at, bias=c.qkv_bias, interleaved=True),
            groups.out(c, at),
        ),
        blocks.Mlp(
            groups.norm(f"{at}post_attention_layernorm", c.hidden_size),
            mlp.fused_weights(c, f"{at}mlp"),
        ),
    )


MODEL = replace(llama.MODEL, config=config, weights=weights)
