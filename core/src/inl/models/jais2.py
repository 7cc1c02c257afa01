"""Jais 2 (Inception, 2025): layer norms, squared ReLU without a gate, biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import layer_norm, llama, mlp
from inl.models.config import MAX_EPS, number
from inl.models.fields import changed, with_defaults

DEFAULTS: Final = {
    "max_position_embeddings": 8192, "hidden_act": "relu2", "attention_bias": True,
    "mlp_bias": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    eps = number(hf, "layer_norm_eps", 1e-5, most=MAX_EPS)
    return llama.config(changed(hf, rms_norm_eps=eps))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.up_proj", f"{stem}.down_proj")

    return layer_norm.weights(c, inner)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer_norm.layer,
    head=layer_norm.head,
)  # fmt: skip
