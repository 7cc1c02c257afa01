"""Qwen2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys, values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama
from inl.models.config import flag, whole
from inl.models.views import views, windows

FULL_LAYERS = 28
"""Default number of leading layers without a window."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    return replace(windowed(llama.config(hf), hf), qkv_bias=True)


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
