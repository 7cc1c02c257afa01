"""Qwen2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys, values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama
from inl.models.config import flag, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.views import views, windows

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
"""Defaults of config fields that differ from Llama's."""
FULL_LAYERS = 28
"""Default number of leading layers without a window."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    base = llama.config(changed(hf, attention_bias=False))
    return replace(windowed(base, hf), qkv_bias=True)


def windowed(base: llama.LlamaConfig, hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Set the window of the later layers if the config enables it."""
    if not flag(hf, "use_sliding_window", False):
        return base
    name = "max_window_layers"
    first = 0 if hf.get(name) == 0 else whole(hf, name, FULL_LAYERS)
    kinds = [
        "sliding_attention" if index >= first else "full_attention"
        for index in range(base.layers)
    ]
    return replace(base, views=views(windows(hf, kinds)))


MODEL = replace(llama.MODEL, config=config)
