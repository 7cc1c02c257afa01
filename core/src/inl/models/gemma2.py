"""Gemma 2 (Gemma team, 2024): every other layer sees a window, scores are capped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inl.models import gemma, llama
from inl.spec.model import Model

CAPS = 50.0, 30.0
"""Of scores and of logits, where the config does not say."""


def config(hf: Mapping[str, Any]) -> gemma.GemmaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    return gemma.config(hf, kinds=kinds, caps=CAPS)


def kinds(layers: int) -> list[str]:
    """Kinds of layers, the first with a window."""
    names = "sliding_attention", "full_attention"
    return [names[index % 2] for index in range(layers)]


MODEL = Model(config, gemma.weights, llama.state, gemma.embed, gemma.layer, gemma.head)
