"""Base of mixtures with sigmoid scores and shared experts on plain attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import deepseek, groups, llama, moe, qwen3_moe
from inl.models.config import flag, number, whole
from inl.spec.weights import Group, Param


def sparse(
    base: llama.LlamaConfig, hf: Mapping[str, Any], *, renormalize: bool
) -> moe.MoeConfig:
    """Add the mixture's fields to a dense config, as DeepSeek-V3 names them.

    renormalize: default of ``norm_topk_prob``. Raises :class:`CheckpointError` naming
    the field.
    """
    dense = whole(hf, "first_k_dense_replace", least=0)
    found = moe.with_experts(
        base, hf, count="n_routed_experts",
        expert_size=whole(hf, "moe_intermediate_size"),
        renormalize=flag(hf, "norm_topk_prob", renormalize),
        dense_layers=tuple(range(min(dense, base.layers))),
        routed_scale=number(hf, "routed_scaling_factor", 1.0),
    )  # fmt: skip
    shared = found.expert_size * whole(hf, "n_shared_experts", 0, least=0)
    grouping = deepseek.grouping(hf, found, "sigmoid", 2)
    return replace(found, shared_size=shared, grouping=grouping)


def feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    """Return the mixture of the layer with name prefix ``at``."""
    routed = qwen3_moe.feed_forward(c, at, norm)._replace(bias=rank_bias(c, at))
    if not c.shared_size:
        return routed
    stem = f"{at}mlp.shared_experts"
    return routed._replace(shared=groups.gated(stem, c.hidden_size, c.shared_size))


def rank_bias(c: moe.MoeConfig, at: str) -> Group:
    """Return the bias of ranks of a layer."""
    name = f"{at}mlp.gate.e_score_correction_bias"
    bias = Param(name, (c.experts,), finite=True, wide=True)
    return Group("group_route", bias=bias)


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return moe.weights(c, feed_forward)
