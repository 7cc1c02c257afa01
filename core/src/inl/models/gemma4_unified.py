"""Gemma 4 with inputs of several kinds in one model (Gemma team, 2026): its text.

As Gemma 4, dense and without embeddings of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import gemma4
from inl.models.fields import changed, with_defaults
from inl.models.gemma4_config import Gemma4Config
from inl.models.gemma4_config import config as gemma4_config

DEFAULTS: Final = {
    "max_position_embeddings": 262144, "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}  # fmt: skip
"""Defaults of config fields that differ from those of Gemma 4."""


def config(hf: Mapping[str, Any]) -> Gemma4Config:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    hf = changed(hf, hidden_size_per_layer_input=0, enable_moe_block=False)
    return gemma4_config(hf)


MODEL = replace(gemma4.MODEL, config=config)
