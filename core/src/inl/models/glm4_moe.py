"""GLM-4.5 to 4.7 (Zhipu, 2025): half of the lanes rotate, sigmoid scores of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import deepseek, llama, moe, sigmoid_moe
from inl.models.config import flag, refuse_unless
from inl.models.fields import with_defaults
from inl.models.rope import rope_fields

DEFAULTS: Final = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    base = replace(
        llama.partly_rotated(hf, rope_fields(hf)),
        head_norm=flag(hf, "use_qk_norm", False),
        out_bias=False,
    )
    return sigmoid_moe.sparse(base, hf, renormalize=True)


MODEL = replace(
    llama.MODEL,
    config=config,
    weights=sigmoid_moe.weights,
    layer=moe.layer,
    adapt=deepseek.adapt,
)
