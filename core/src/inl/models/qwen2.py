"""Qwen2 and 2.5 (Yang et al., 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.errors import CheckpointError
from inl.models import llama
from inl.models.config import flag


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    if flag(hf, "use_sliding_window", False):
        raise CheckpointError(
            "config field 'use_sliding_window': found true, accepted: false"
        )
    return replace(llama.config(hf), qkv_bias=True)


MODEL = replace(llama.MODEL, config=config)
