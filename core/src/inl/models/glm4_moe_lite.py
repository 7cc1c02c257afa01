"""GLM-4.7-Flash (Zhipu, 2026): the latent attention and experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import deepseek, deepseek_v3, mla
from inl.models.fields import changed, with_defaults

DEFAULTS: Final = {
    "num_key_value_heads": 20, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.8,
}  # fmt: skip
"""Defaults of config fields that differ from those of DeepSeek-V3."""


def config(hf: Mapping[str, Any]) -> mla.MlaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    hf.get("first_k_dense_replace")  # which transformers does not read
    base = deepseek_v3.config(changed(hf, first_k_dense_replace=1))
    return deepseek.with_kinds(hf, base)


MODEL = replace(deepseek_v3.MODEL, config=config)
