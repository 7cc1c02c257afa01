"""PaddleOCR-VL, text (Baidu, 2025): Llama that turns by positions along three axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama
from inl.models.config import fields_of, flag
from inl.models.fields import changed, with_defaults

THETA: Final = 500000.0
DEFAULTS: Final = {
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
SECTIONS: Final = [16, 24, 24]
"""Default planes of each axis."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    bias = flag(hf, "use_bias", False)
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = {"rope_type": "default", "mrope_section": SECTIONS, **fields_of(hf, name)}
    hf = changed(hf, attention_bias=bias, mlp_bias=bias, **{name: rope})
    return llama.config(hf, theta=THETA)


MODEL = replace(llama.MODEL, config=config)
