"""Qwen3-MoE (Yang et al., 2025): norms per head, many small experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.errors import CheckpointError
from inl.models import llama, moe
from inl.models.config import flag, refuse_unless, whole
from inl.models.fields import with_defaults
from inl.spec.weights import Group

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}
"""Defaults of config fields that differ from Llama's."""
EXPERTS = 128
"""Default number of experts."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    base = replace(llama.config(hf), head_norm=True)
    return sparse(base, hf, experts=EXPERTS)


def sparse(
    base: llama.LlamaConfig, hf: Mapping[str, Any], *, experts: int
) -> moe.MoeConfig:
    """Add the mixture fields shared by the Qwen MoE models.

    experts: the family's default number of experts.
    """
    if flag(hf, "use_sliding_window", False):
        raise CheckpointError(
            "config field 'use_sliding_window': found true, accepted: false"
        )
    count = "num_experts"
    if count not in hf and "num_local_experts" in hf:
        count = "num_local_experts"
    hf = with_defaults(hf, {count: experts})
    return moe.with_experts(
        base,
        hf,
        count=count,
        expert_size=whole(hf, "moe_intermediate_size"),
        renormalize=flag(hf, "norm_topk_prob", False),
        dense_layers=dense_layers(hf, base.layers),
    )


def dense_layers(hf: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return layers without experts: listed ones and those off the sparse period."""
    listed = hf.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise CheckpointError(
            f"config field 'mlp_only_layers': found {listed!r}, "
            "expected a list of layer numbers"
        )
    step = whole(hf, "decoder_sparse_step", 1)
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return moe.weights(c, feed_forward)


def feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    """Return the MoE block of the layer with name prefix ``at``."""
    stem = f"{at}mlp.experts"
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    experts = moe.expert_group(c, stem, stem, **names)
    return moe.Moe(norm, moe.router(c, f"{at}mlp.gate.weight"), experts)


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=moe.layer)
