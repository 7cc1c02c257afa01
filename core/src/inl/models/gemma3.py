"""Gemma 3 text model (Gemma team, 2025): most layers have an attention window.

Layers with a window use another rotary base frequency. Each head of queries and keys is
normalized.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from inl.models import gemma, llama
from inl.models.config import fields_of, number, rope_scaling, whole
from inl.ops.rope import RopeScaling
from inl.spec.model import Model

THETA, LOCAL_THETA = 1e6, 1e4
PATTERN = 6
"""Default period of layers without a window."""


def config(hf: Mapping[str, Any]) -> gemma.GemmaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    full, local = rope(hf)
    return gemma.config(
        {**hf, "rope_parameters": full, "rope_scaling": None},
        kinds=partial(kinds, pattern=whole(hf, "sliding_window_pattern", PATTERN)),
        caps=(None, None),
        head_norm=True,
        local_rope=local,
    )


def kinds(layers: int, *, pattern: int) -> list[str]:
    """Return layer types; the last layer of each ``pattern`` has no window."""
    names = "sliding_attention", "full_attention"
    return [names[(index + 1) % pattern == 0] for index in range(layers)]


def rope(
    hf: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[float, RopeScaling]]:
    """Return rope fields of full-attention layers, then base and scaling of others."""
    nested = fields_of(hf, "rope_parameters")
    theta = number(hf, "rope_theta", THETA)
    plain = {"rope_theta": theta, **fields_of(hf, "rope_scaling")}
    full = {"rope_theta": theta, **(fields_of(nested, "full_attention") or plain)}
    base = number(hf, "rope_local_base_freq", LOCAL_THETA)
    local = {"rope_theta": base, **fields_of(nested, "sliding_attention")}
    return full, rope_scaling({**hf, "rope_parameters": local})


MODEL = Model(config, gemma.weights, llama.state, gemma.embed, gemma.layer, gemma.head)
