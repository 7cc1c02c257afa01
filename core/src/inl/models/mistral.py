"""Mistral (Jiang et al., 2023): Llama with an optional window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama
from inl.models.config import refuse_unless
from inl.models.fields import with_defaults
from inl.models.rope import THETA
from inl.models.views import one_window, views

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any], *, theta: float = THETA) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name in ("attention_bias", "mlp_bias"):
        refuse_unless(hf, name, False)
    base = llama.config(hf, theta=theta)
    refuse_unless(hf, "layer_types", None)
    return replace(base, views=views(one_window(hf, base.layers, base.max_tokens)))


MODEL = replace(llama.MODEL, config=config)
