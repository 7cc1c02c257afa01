"""Mistral (Jiang et al., 2023): Llama with an optional window in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama
from inl.models.config import refuse_unless
from inl.models.views import one_window, views


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    refuse_unless(hf, "attention_bias", False)
    base = llama.config(hf)
    refuse_unless(hf, "layer_types", None)
    return replace(base, views=views(one_window(hf, base.layers, base.max_tokens)))


MODEL = replace(llama.MODEL, config=config)
