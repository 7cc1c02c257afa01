"""SmolLM3 (Hugging Face, 2025): Llama in which some layers do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import llama
from inl.models.config import flag, whole
from inl.models.fields import with_defaults
from inl.models.views import views, windows

THETA = 2e6
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Defaults of config fields that differ from Llama's."""
PERIOD, PERIOD_FIELD = 4, "no_rope_layer_interval"
"""Default period of layers that do not rotate."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = llama.config(hf, theta=THETA)
    rotated = rotated_layers(hf, base.layers)
    spans: tuple[int | None, ...] = (None,) * base.layers
    if flag(hf, "use_sliding_window", False) and hf.get("sliding_window") is not None:
        kinds = "sliding_attention", "full_attention"
        spans = windows(hf, [kinds[turns] for turns in rotated])
    return replace(base, views=views(spans, rotated))


def rotated_layers(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Read whether each layer rotates: 1 in ``no_rope_layers``, despite its name."""
    listed, period = hf.get("no_rope_layers"), whole(hf, PERIOD_FIELD, PERIOD)
    if listed is None:
        return tuple((index + 1) % period != 0 for index in range(layers))
    whole_list = isinstance(listed, list) and len(listed) == layers
    if not whole_list or any(one not in (0, 1) for one in listed):
        raise CheckpointError(
            f"config field 'no_rope_layers': found {show(listed)}, expected a list of "
            f"{layers}, 0 or 1 for each layer"
        )
    return tuple(map(bool, listed))


MODEL = replace(llama.MODEL, config=config)
