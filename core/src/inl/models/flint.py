"""Flint (Recursive, 2026): attention sinks, sigmoid scores, an expert of all tokens.

Only layers with a window rotate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import granite_swa, groups, llama, moe, qwen3_moe
from inl.models.config import refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.views import views, windows
from inl.spec.weights import Group

DEFAULTS: Final = {
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 262144,
    "sliding_window": 513, "moe_intermediate_size": 512, "num_experts_per_tok": 6,
    "shared_expert_intermediate_size": 1024, "norm_topk_prob": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
EXPERTS: Final = 256
DENSE: Final = (0, 1)
"""Default layers without experts."""
PERIOD: Final = 4


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    if hf.get("mlp_only_layers") is None:
        hf = changed(hf, mlp_only_layers=list(DENSE))
    base = llama.config(hf)
    spans = windows(hf, [_kind(base.layers, index) for index in range(base.layers)])
    turned = [span is not None for span in spans]
    base = replace(base, head_norm=True, views=views(spans, turned))
    found = qwen3_moe.sparse(
        base, changed(hf, use_sliding_window=False), experts=EXPERTS
    )
    return replace(
        found, grouping=moe.Grouping("sigmoid", 1, 1, 1),
        shared_size=whole(hf, "shared_expert_intermediate_size"),
    )  # fmt: skip


def _kind(layers: int, index: int) -> str:
    full = index < len(DENSE) or index % PERIOD == 1 or index == layers - 1
    return "full_attention" if full else "sliding_attention"


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    tree = moe.weights(c, feed_forward)
    return granite_swa.with_sinks(c, tree, "softmax_offset")


def feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    """Return the mixture of the layer with name prefix ``at``."""
    stem = f"{at}mlp.shared_expert"
    return qwen3_moe.feed_forward(c, at, norm)._replace(
        shared=groups.gated(stem, c.hidden_size, c.shared_size),
        bias=moe.no_bias(c, at),
    )


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=moe.layer)
