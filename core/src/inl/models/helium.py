"""Helium (Kyutai, 2025): Llama whose rotating planes are adjacent lanes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import ernie4_5, llama
from inl.models.fields import with_defaults

THETA: Final = 100000.0
DEFAULTS: Final = {
    "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    base = llama.config(with_defaults(hf, DEFAULTS), theta=THETA)
    return replace(base, out_bias=False)


MODEL = replace(ernie4_5.MODEL, config=config)
