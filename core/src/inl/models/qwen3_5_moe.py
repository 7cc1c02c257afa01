"""Qwen3.5-MoE text models (Qwen team, 2026): Qwen3.5 with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import moe, qwen3_5, qwen3_next
from inl.models.config import whole
from inl.models.fields import with_defaults

DEFAULTS: Final = qwen3_5.DEFAULTS | {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 1,  # no layer is dense
}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> qwen3_next.NextConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    sparse = moe.with_experts(
        qwen3_5.attention_config(hf),
        hf,
        count="num_experts",
        expert_size=whole(hf, "moe_intermediate_size"),
        shared_size=whole(hf, "shared_expert_intermediate_size"),
        renormalize=True,
    )
    return qwen3_next.recurrent_config(hf, sparse)


MODEL = replace(qwen3_5.MODEL, config=config)
