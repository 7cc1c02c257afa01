"""Qwen2-MoE and Qwen1.5-MoE (Yang et al., 2024): with a gated shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import groups, llama, moe, qwen3_moe
from inl.models.config import flag, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.views import refuse_windows
from inl.spec.weights import Group, Param

DEFAULTS = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
}
"""Defaults of config fields that differ from Llama's."""
EXPERTS = 60
"""Default number of experts."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    refuse_windows(hf)
    base = llama.config(changed(hf, attention_bias=False))
    base = replace(base, qkv_bias=flag(hf, "qkv_bias", True))
    shared = whole(hf, "shared_expert_intermediate_size")
    return replace(qwen3_moe.sparse(base, hf, experts=EXPERTS), shared_size=shared)


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return moe.weights(c, feed_forward)


def feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    """Return the MoE block of the layer with name prefix ``at``."""
    h, inner, stem = c.hidden_size, c.shared_size, f"{at}mlp.shared_expert"
    shared = groups.gated(stem, h, inner)
    gate = Group("linear", weight=Param(f"{stem}_gate.weight", (1, h)))
    routed = qwen3_moe.feed_forward(c, at, norm)
    return routed._replace(shared=shared, shared_gate=gate)


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=moe.layer)
