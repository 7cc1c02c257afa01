"""OLMoE (OLMo team, 2024): many small experts, norms over all query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import llama, moe, qwen3_moe, wide_norm
from inl.models.config import flag, refuse_unless
from inl.models.fields import with_defaults

DEFAULTS: Final = {
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8,
    "num_experts": 64,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name, accepted in (("mlp_bias", False), ("clip_qkv", None)):
        refuse_unless(hf, name, accepted)
    base = llama.config(hf)
    return moe.with_experts(
        base, hf, count="num_experts", expert_size=base.intermediate_size,
        renormalize=flag(hf, "norm_topk_prob", False),
    )  # fmt: skip


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return wide_norm.weights(c, qwen3_moe.weights(c))


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=wide_norm.layer)
