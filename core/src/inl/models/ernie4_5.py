"""ERNIE 4.5 (Baidu, 2025), dense: Llama whose rotating planes are adjacent lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import groups, llama
from inl.models.config import flag
from inl.models.fields import changed, with_defaults

THETA: Final = 500000.0
DEFAULTS: Final = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    bias = flag(hf, "use_bias", False)
    return llama.config(changed(hf, attention_bias=bias, mlp_bias=bias), theta=THETA)


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return interleaved(c, llama.weights(c))


def interleaved(c: llama.LlamaConfig, tree: llama.Weights) -> llama.Weights:
    """Return a tree whose queries and keys have planes of adjacent lanes."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        qkv = groups.qkv(c, at, bias=c.qkv_bias, interleaved=True)
        return layer._replace(attention=layer.attention._replace(qkv=qkv))

    return llama.with_layers(tree, changed)


MODEL = replace(llama.MODEL, config=config, weights=weights)
