"""Nemotron-4 and Minitron (NVIDIA, 2024): layer norms around one, squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import layer_norm, llama, mlp
from inl.models.config import MAX_EPS, number
from inl.models.fields import changed, with_defaults
from inl.models.rope import rope_fields

DEFAULTS: Final = {
    "max_position_embeddings": 4096, "hidden_act": "relu2",
    "partial_rotary_factor": 0.5,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
OFFSET: Final = 1.0
"""What is added to the stored weights of norms."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    eps = number(hf, "norm_eps", 1e-5, most=MAX_EPS)
    hf = changed(hf, rms_norm_eps=eps)
    return llama.partly_rotated(hf, rope_fields(hf))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.up_proj", f"{stem}.down_proj")

    return layer_norm.weights(c, inner, offset=OFFSET)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer_norm.layer,
    head=layer_norm.head,
)  # fmt: skip
