"""Youtu-LLM (Tencent, 2025): latent attention as in DeepSeek-V3, dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import deepseek, mla
from inl.models.config import flag
from inl.models.fields import with_defaults

DEFAULTS: Final = {
    **deepseek.DEFAULTS, "num_key_value_heads": 16, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> mla.MlaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = deepseek.rotated(hf)
    return deepseek.with_latents(
        hf, base, dense_layers=tuple(range(base.layers)),
        interleaved=flag(hf, "rope_interleave", True),
    )  # fmt: skip


MODEL = replace(deepseek.MODEL, config=config)
