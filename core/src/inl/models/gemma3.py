"""Gemma 3, its text model (Gemma team, 2025): most layers see a window.

Those with a window rotate by a base frequency of their own. Queries and keys are
normed, each head by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from inl.models import gemma, llama
from inl.models.config import number, rope_scaling, whole
from inl.ops.rope import RopeScaling
from inl.spec.model import Model

THETA, LOCAL_THETA = 1e6, 1e4
PATTERN = 6
"""Of so many layers the last one sees everything, where the config does not say."""


def config(hf: Mapping[str, Any]) -> gemma.GemmaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    everywhere, local = rope(hf)
    return gemma.config(
        {**hf, "rope_parameters": everywhere, "rope_scaling": None},
        kinds=partial(kinds, pattern=whole(hf, "sliding_window_pattern", PATTERN)),
        caps=(None, None),
        head_norm=True,
        local_rope=local,
    )


def kinds(layers: int, *, pattern: int) -> list[str]:
    """Kinds of layers, the last of each ``pattern`` without a window."""
    names = "sliding_attention", "full_attention"
    return [names[(index + 1) % pattern == 0] for index in range(layers)]


def rope(
    hf: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[float, RopeScaling]]:
    """Fields of the layers that see everything, and the others' base and scaling."""
    given = hf.get("rope_parameters")
    nested = given if isinstance(given, Mapping) else {}
    theta = number(hf, "rope_theta", THETA)
    plain = {"rope_theta": theta, **(hf.get("rope_scaling") or {})}
    everywhere = {"rope_theta": theta, **(nested.get("full_attention") or plain)}
    base = number(hf, "rope_local_base_freq", LOCAL_THETA)
    local = {"rope_theta": base, **(nested.get("sliding_attention") or {})}
    return everywhere, rope_scaling({**hf, "rope_parameters": local})


MODEL = Model(config, gemma.weights, llama.state, gemma.embed, gemma.layer, gemma.head)
