"""Qwen3-MoE (Yang et al., 2025): norms per head, many small experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.errors import CheckpointError
from inl.models import llama, moe
from inl.models.config import flag, whole
from inl.spec.weights import Group


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    return sparse(replace(llama.config(hf), head_norm=True), hf)


def sparse(base: llama.LlamaConfig, hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Add the mixture fields shared by the Qwen MoE models."""
    if flag(hf, "use_sliding_window", False):
        raise CheckpointError(
            "config field 'use_sliding_window': found true, accepted: false"
        )
    known = "num_experts" in hf
    return moe.with_experts(
        base,
        hf,
        count="num_experts" if known else "num_local_experts",
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
