"""dots.llm1 (rednote-hilab, 2025): norms per head, sigmoid scores, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama, moe, sigmoid_moe
from inl.models.config import refuse_unless, whole
from inl.models.fields import with_defaults
from inl.models.views import views, windows

DEFAULTS: Final = {
    "max_position_embeddings": 2048, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "sliding_window": 4096,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
FULL_LAYERS: Final = 62
"""Default number of leading layers without a window."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    base = replace(llama.config(hf), head_norm=True)
    first = whole(hf, "max_window_layers", FULL_LAYERS, least=0)
    late = hf.get("sliding_window") is not None
    names = "full_attention", "sliding_attention"
    kinds = [names[late and index >= first] for index in range(base.layers)]
    base = replace(base, views=views(windows(hf, kinds)))
    return sigmoid_moe.sparse(base, hf, renormalize=False)


MODEL = replace(
    llama.MODEL, config=config, weights=sigmoid_moe.weights, layer=moe.layer
)
