"""Granite mixtures with windows (IBM, 2026): as Granite with windows, with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from inl.models import granite_moe, granite_swa, llama, moe
from inl.models.fields import with_defaults
from inl.ops.rope import RopeScaling

DEFAULTS: Final = {"sliding_window": 128}
"""Defaults of config fields that differ from those of other Granite mixtures."""


@dataclass(frozen=True, slots=True)
class SwaConfig(granite_moe.GraniteMoeConfig):
    """Sizes and constants of one checkpoint."""

    local_rope: tuple[float, RopeScaling] | None = None
    """Base frequency and scaling of the layers ``local``."""
    local: tuple[int, ...] = ()


def config(hf: Mapping[str, Any]) -> SwaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = llama.extended(SwaConfig, granite_moe.config(hf))
    return replace(base, **granite_swa.rotation(hf, base))


def weights(c: SwaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return granite_swa.with_sinks(c, granite_moe.weights(c))


MODEL = replace(
    granite_swa.MODEL, config=config, weights=weights,
    layer=partial(granite_swa.layer, moe.feed_forward),
)  # fmt: skip
