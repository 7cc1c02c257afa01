"""DeepSeek-V3.2 (DeepSeek-AI, 2025): DeepSeek-V3 with sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import deepseek_v3, sparse_mla

DEFAULTS: Final = {
    **deepseek_v3.DEFAULTS, "max_position_embeddings": 163840,
    "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> sparse_mla.SparseConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    return sparse_mla.config(hf, DEFAULTS)


MODEL = replace(sparse_mla.MODEL, config=config)
