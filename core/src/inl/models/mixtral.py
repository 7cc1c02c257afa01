"""Mixtral (Jiang et al., 2024): Mistral with mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.models import llama, mistral, moe
from inl.spec.weights import Group

DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}
"""Defaults of config fields that differ from Mistral's."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    base = mistral.config({**DEFAULTS, **hf})
    return moe.with_experts(
        base, hf, count="num_local_experts", expert_size=base.intermediate_size
    )


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return moe.weights(c, _feed_forward)


def _feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    old, new = f"{at}block_sparse_moe", f"{at}mlp"
    return moe.Moe(
        norm,
        moe.router(c, f"{old}.gate.weight", f"{new}.gate.weight"),
        moe.expert_group(
            c, f"{old}.experts", f"{new}.experts", gate="w1", up="w3", down="w2"
        ),
    )


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=moe.layer)
