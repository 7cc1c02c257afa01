"""OLMo 3 (OLMo team, 2025): OLMo 2 with a window in three of four layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inl.models import blocks, llama, olmo2
from inl.models.fields import with_defaults
from inl.models.rope import local_ropes
from inl.models.views import one_full_in, views, windows
from inl.ops.rope import RopeScaling
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

THETA = 5e5
DEFAULTS = {**olmo2.DEFAULTS, "sliding_window": 4096}
"""Defaults of config fields that differ from Llama's."""


@dataclass(frozen=True, slots=True)
class Olmo3Config(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    local_rope: tuple[float, RopeScaling] | None = None
    """Base frequency and scaling of layers with a window."""


def config(hf: Mapping[str, Any]) -> Olmo3Config:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    full, local = local_ropes(hf, THETA, THETA)
    base = olmo2.with_rope(hf, full)
    kinds = one_full_in(base.layers, period=4)
    layer_views = views(windows(hf, kinds))
    return llama.extended(Olmo3Config, base, views=layer_views, local_rope=local[:2])


def embed(ops: Ops, c: Olmo3Config, w: Any, step: Step) -> blocks.LocalCarry:
    return blocks.embed_local(ops, c, w.embed, step)


MODEL = replace(olmo2.MODEL, config=config, embed=embed)
