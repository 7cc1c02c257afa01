"""Qwen3 (Yang et al., 2025): Llama with norms per query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama
from inl.models.config import refuse_unless
from inl.models.qwen2 import windowed

HEAD_DIM = 128
"""Default of ``head_dim``."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    refuse_unless(hf, "attention_bias", False)
    base = llama.config({**hf, "head_dim": hf.get("head_dim") or HEAD_DIM})
    return replace(windowed(base, hf), head_norm=True)


MODEL = replace(llama.MODEL, config=config)
