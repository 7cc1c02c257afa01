"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024): routing by sigmoids with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import deepseek, mla
from inl.models.config import flag, refuse_unless
from inl.models.fields import with_defaults

DEFAULTS: Final = {
    **deepseek.DEFAULTS, "n_routed_experts": 256, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "num_key_value_heads": 128, "max_position_embeddings": 4096,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> mla.MlaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "scoring_func", "sigmoid")
    refuse_unless(hf, "topk_method", "noaux_tc")
    base = deepseek.common(hf)
    return replace(
        base,
        grouping=deepseek.grouping(hf, base, "sigmoid", 2),
        renormalize=flag(hf, "norm_topk_prob", True),
        interleaved=flag(hf, "rope_interleave", True),
    )


MODEL = replace(deepseek.MODEL, config=config)
