"""Hy3 (Tencent, 2026): norms per head, sigmoid scores with a bias of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import deepseek, llama, moe, sigmoid_moe
from inl.models.config import refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed

THETA: Final = 11158840.0
DEFAULTS: Final = {
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "num_experts": 192, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826, "first_k_dense_replace": 1,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
RENAMES: Final = {
    r"\.mlp\.(e_score_correction_bias|expert_bias)$": (
        ".mlp.gate.e_score_correction_bias"
    ),
    r"\.mlp\.router\.gate\.": ".mlp.gate.",
    r"\.mlp\.shared_mlp\.": ".mlp.shared_experts.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    hf.get("enable_moe_fp32_combine")  # of how sums are rounded
    base = replace(llama.config(hf, theta=THETA), head_norm=True)
    hf = changed(
        hf, n_routed_experts=whole(hf, "num_experts"), n_group=1, topk_group=1,
        n_shared_experts=whole(hf, "num_shared_experts"), norm_topk_prob=True,
        routed_scaling_factor=hf["router_scaling_factor"],
    )  # fmt: skip
    found = sigmoid_moe.sparse(base, hf, renormalize=True)
    return deepseek.with_kinds(hf, found)


def adapt(
    c: moe.MoeConfig, checkpoint: Checkpoint
) -> tuple[moe.MoeConfig, AdaptedCheckpoint]:
    """Rename tensors, and leave out the layers that predict further tokens."""
    c, checkpoint = deepseek.adapt(c, checkpoint)
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(
    llama.MODEL, config=config, weights=sigmoid_moe.weights, layer=moe.layer,
    adapt=adapt,
)  # fmt: skip
