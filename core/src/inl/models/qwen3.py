"""Qwen3 (Yang et al., 2025): Llama with norms per query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama, qwen2
from inl.models.config import refuse_unless
from inl.models.fields import with_defaults
from inl.models.qwen2 import windowed

DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    base = llama.config(hf)
    return replace(windowed(base, hf), head_norm=True)


MODEL = replace(llama.MODEL, config=config)
