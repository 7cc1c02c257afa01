"""Mixtral (Jiang et al., 2024): Mistral with mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama, mistral, moe
from inl.models.fields import with_defaults
from inl.spec.weights import Group

THETA = 1e6
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""Defaults of config fields that differ from Mistral's."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = mistral.config(hf, theta=THETA)
    return moe.with_experts(
        base, hf, count="num_local_experts", expert_size=base.intermediate_size
    )


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return moe.weights(c, feed_forward)


def feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    """Return the MoE block of the layer with name prefix ``at``."""
    old, new = f"{at}block_sparse_moe", f"{at}mlp"
    return moe.Moe(
        norm,
        moe.router(c, f"{old}.gate.weight", f"{new}.gate.weight"),
        moe.expert_group(
            c, f"{old}.experts", f"{new}.experts", gate="w1", up="w3", down="w2"
        ),
    )


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=moe.layer)
