"""LFM2 with experts (Liquid AI, 2025): sigmoid scores, ranked with a bias.

transformers adds 1e-6 to the sum of a token's scores before it divides by it; the
weights of its experts differ by that share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import lfm2, llama, moe, sigmoid_moe
from inl.models.config import flag, number, whole
from inl.models.fields import with_defaults
from inl.spec.weights import Group

DEFAULTS: Final = {
    "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
    "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
"""Defaults of config fields that differ from those of LFM2."""


def config(hf: Mapping[str, Any]) -> lfm2.Lfm2Config:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = lfm2.attention_config(hf)
    dense = whole(hf, "num_dense_layers", least=0)
    sparse = moe.with_experts(
        base, hf, count="num_experts", expert_size=whole(hf, "moe_intermediate_size"),
        renormalize=flag(hf, "norm_topk_prob", True),
        dense_layers=tuple(range(min(dense, base.layers))),
        routed_scale=number(hf, "routed_scaling_factor", 1.0),
        grouping=moe.Grouping("sigmoid", 1, 1, 1),
    )  # fmt: skip
    biased = flag(hf, "use_expert_bias", True)
    return lfm2.recurrent_config(hf, sparse, hf.get("layer_types"), rank_bias=biased)


def weights(c: lfm2.Lfm2Config) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""

    def mixture(_: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
        found = sigmoid_moe.feed_forward(c, at, norm)
        bias = found.bias.params["bias"]._replace(optional=not c.rank_bias)
        return found._replace(bias=Group("group_route", bias=bias))

    return lfm2.with_convolutions(c, moe.weights(c, mixture))


MODEL = replace(lfm2.MODEL, config=config, weights=weights)
