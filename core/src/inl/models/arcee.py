"""AFM (Arcee AI, 2025): Llama with feed-forward layers of squared ReLU, no gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama, mlp
from inl.models.fields import with_defaults

DEFAULTS: Final = {
    "hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    return llama.config(with_defaults(hf, DEFAULTS))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        inner = mlp.ungated(c, f"{at}mlp.up_proj", f"{at}mlp.down_proj")
        return layer._replace(mlp=layer.mlp._replace(mlp=inner))

    return llama.with_layers(llama.weights(c), changed)


MODEL = replace(llama.MODEL, config=config, weights=weights)
