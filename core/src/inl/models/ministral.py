"""Ministral (Mistral AI, 2024): Mistral with a window in some of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama, mistral
from inl.models.fields import changed, with_defaults
from inl.models.views import views, windows


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, mistral.DEFAULTS)
    base = mistral.config(changed(hf, layer_types=None, sliding_window=None))
    has_window = hf.get("sliding_window") is not None
    kind = "sliding_attention" if has_window else "full_attention"
    return replace(base, views=views(windows(hf, [kind] * base.layers)))


MODEL = replace(llama.MODEL, config=config)
