"""Solar Open (Upstage, 2025): GLM-4.5 with full rotation and experts in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import deepseek, llama, moe, sigmoid_moe
from inl.models.fields import changed, with_defaults
from inl.models.rope import read_rope

DEFAULTS: Final = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "head_dim": 128, "moe_intermediate_size": 1280, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "n_routed_experts": 128, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
THETA: Final = 1e6
"""Default base frequency of the rotation."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    if "num_local_experts" in hf:
        hf = changed(hf, n_routed_experts=hf["num_local_experts"])
    hf = changed(
        hf, first_k_dense_replace=0, mlp_bias=False,
        intermediate_size=hf["moe_intermediate_size"],
    )  # fmt: skip
    base = replace(llama.with_rope(hf, read_rope(hf, theta=THETA)), out_bias=False)
    return sigmoid_moe.sparse(base, hf, renormalize=True)


MODEL = replace(
    llama.MODEL, config=config, weights=sigmoid_moe.weights, layer=moe.layer,
    adapt=deepseek.adapt,
)  # fmt: skip
