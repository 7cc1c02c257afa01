"""Gemma 3 text model (Gemma team, 2025): most layers have an attention window.

Layers with a window use another rotary base frequency. Each head of queries and keys is
normalized.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from inl.models import gemma, llama
from inl.models.config import whole
from inl.models.fields import with_defaults
from inl.models.rope import local_ropes
from inl.models.views import one_full_in
from inl.spec.model import Model, ModelInputs

THETA, LOCAL_THETA = 1e6, 1e4
DEFAULTS = {**gemma.DEFAULTS, "max_position_embeddings": 131072}
"""Defaults of config fields that differ from Llama's."""
PATTERN = 6
"""Default period of layers without a window."""


def config(hf: Mapping[str, Any]) -> gemma.GemmaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    pattern = whole(hf, "sliding_window_pattern", PATTERN)
    full, local = local_ropes(hf, THETA, LOCAL_THETA, "rope_local_base_freq")
    return gemma.config(
        hf,
        rope=full,
        kinds=partial(one_full_in, period=pattern),
        attention_cap=None,  # transformers ignores attn_logit_softcapping
        logit_cap=None,
        head_norm=True,
        local_rope=local[:2],
    )


def inputs(_config: gemma.GemmaConfig) -> ModelInputs:
    """Return that the tokens of an image attend to each other."""
    return ModelInputs(spans=True)


MODEL = Model(
    config, gemma.weights, llama.state, gemma.embed, gemma.layer, gemma.head,
    inputs=inputs,
)  # fmt: skip
