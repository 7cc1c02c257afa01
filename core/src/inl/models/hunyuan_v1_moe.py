"""Hunyuan-A13B (Tencent, 2025): Hunyuan with experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import groups, hunyuan_v1_dense, llama, moe
from inl.models.fields import changed, with_defaults
from inl.spec.weights import Group


def config(hf: Mapping[str, Any]) -> moe.MoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, {"num_experts": 1, "moe_topk": 1})
    base = hunyuan_v1_dense.config(hf)
    counts = {name: _of_all(hf, name) for name in ("num_experts", "moe_topk")}
    given = changed(
        hf, num_experts=counts["num_experts"], num_experts_per_tok=counts["moe_topk"]
    )
    return moe.with_experts(
        base, given, count="num_experts", expert_size=base.intermediate_size,
        shared_size=base.intermediate_size,
    )  # fmt: skip


def _of_all(hf: Mapping[str, Any], name: str) -> Any:
    """Return a field that may be a list with a number for each layer."""
    value = hf.get(name)
    if not isinstance(value, (list, tuple)):
        return value
    if not value or any(each != value[0] for each in value):
        raise CheckpointError(
            f"config field {name!r}: found {show(value)}, accepted: the same number "
            "for every layer"
        )
    return value[0]


def weights(c: moe.MoeConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return hunyuan_v1_dense.with_norms(c, moe.weights(c, feed_forward))


def feed_forward(c: moe.MoeConfig, at: str, norm: Group) -> moe.Moe:
    """Return the MoE block of the layer with name prefix ``at``."""
    stem = f"{at}mlp.experts"
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return moe.Moe(
        norm,
        moe.router(c, f"{at}mlp.gate.wg.weight"),
        moe.expert_group(c, stem, stem, **names),
        groups.gated(f"{at}mlp.shared_mlp", c.hidden_size, c.shared_size),
    )


MODEL = replace(hunyuan_v1_dense.MODEL, config=config, weights=weights)
