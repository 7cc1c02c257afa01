"""Seed-OSS (ByteDance Seed, 2025): Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama
from inl.models.config import flag
from inl.models.fields import with_defaults

DEFAULTS: Final = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
    "attention_bias": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    return replace(llama.config(hf), out_bias=flag(hf, "attention_out_bias", False))


MODEL = replace(llama.MODEL, config=config)
