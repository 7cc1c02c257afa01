"""Code World Model (Meta FAIR, 2025): Llama 3 with windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama
from inl.models.config import refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.rope import ORIGINAL
from inl.models.views import views, windows

DEFAULTS: Final = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "sliding_window": 8192,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
ROPE: Final = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, ORIGINAL: 8192,
}  # fmt: skip
"""Rotation of a config that has none."""
PERIOD: Final = 4
"""Default period of layers without a window, of which the first is one."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    if hf.get("rope_parameters") is None and hf.get("rope_scaling") is None:
        hf = changed(hf, rope_parameters=dict(ROPE))
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "attention_bias", False)
    base = llama.config(hf, theta=1e6)
    names = "sliding_attention", "full_attention"
    kinds = [names[index % PERIOD == 0] for index in range(base.layers)]
    return replace(base, views=views(windows(hf, kinds)))


MODEL = replace(llama.MODEL, config=config)
