"""Command R7B and Command A (Cohere, 2024): only layers with a window rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import cohere
from inl.models.config import whole
from inl.models.fields import with_defaults
from inl.models.rope import THETA
from inl.models.views import one_full_in, views, windows

PERIOD: Final = 4
"""Default period of layers without a window."""


def config(hf: Mapping[str, Any]) -> cohere.CohereConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, cohere.DEFAULTS)
    base = cohere.common(hf, THETA)
    period = whole(hf, "sliding_window_pattern", PERIOD)
    spans = windows(hf, one_full_in(base.layers, period=period))
    rotated = tuple(span is not None for span in spans)
    return replace(base, views=views(spans, rotated))


MODEL = replace(cohere.MODEL, config=config)
