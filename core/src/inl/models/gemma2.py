"""Gemma 2 (Gemma team, 2024): alternating windows, capped attention scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inl.models import gemma, llama
from inl.models.config import cap
from inl.models.fields import with_defaults
from inl.models.rope import read_rope
from inl.models.views import alternating
from inl.spec.model import Model

ATTENTION_CAP, LOGIT_CAP = 50.0, 30.0
"""Default soft caps of attention scores and of logits."""


def config(hf: Mapping[str, Any]) -> gemma.GemmaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, gemma.DEFAULTS)
    return gemma.config(
        hf,
        rope=read_rope(hf),
        kinds=alternating,
        attention_cap=cap(hf, "attn_logit_softcapping", ATTENTION_CAP),
        logit_cap=LOGIT_CAP,
    )


MODEL = Model(config, gemma.weights, llama.state, gemma.embed, gemma.layer, gemma.head)
