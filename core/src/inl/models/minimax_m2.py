"""MiniMax-M2 (MiniMax, 2025): norms over all heads, sigmoid scores of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama, mixtral, moe, wide_norm
from inl.models.config import refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.rope import rope_fields
from inl.spec.weights import Group, Param

THETA: Final = 5e6
DEFAULTS: Final = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
    "num_experts_per_tok": 8, "num_local_experts": 256,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name, accepted in (("mlp_bias", False), ("attention_bias", False),
                           ("scoring_func", "sigmoid"),
                           ("use_routing_bias", True)):  # fmt: skip
        refuse_unless(hf, name, accepted)
    if hf.get("rotary_dim") is not None:
        share = whole(hf, "rotary_dim") / whole(hf, "head_dim")
        hf = changed(hf, partial_rotary_factor=share)
    base = llama.partly_rotated(hf, rope_fields(hf, theta=THETA))
    found = moe.with_experts(
        base, hf, count="num_local_experts", expert_size=base.intermediate_size
    )
    return replace(found, grouping=moe.Grouping("sigmoid", 1, 1, 1))


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return wide_norm.weights(c, moe.weights(c, _feed_forward))


def _feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    name = "e_score_correction_bias"
    bias = Param(f"{at}block_sparse_moe.{name}", (c.experts,), finite=True, wide=True)
    new = bias._replace(source=f"{at}mlp.{name}")
    group = Group("group_route", bias=bias._replace(aliases=(new,)))
    return mixtral.feed_forward(c, at, norm)._replace(bias=group)


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=wide_norm.layer)
