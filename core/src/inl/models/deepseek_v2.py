"""DeepSeek-V2 (DeepSeek-AI, 2024): routing by softmax, from the best groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import deepseek, mla
from inl.models.config import one_of, refuse_unless
from inl.models.fields import with_defaults

DEFAULTS: Final = {
    **deepseek.DEFAULTS, "n_routed_experts": 64, "n_shared_experts": 2,
    "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
METHODS: Final = {"greedy": "", "group_limited_greedy": "softmax"}
"""Values of ``topk_method``, and the kind of scores of groups."""


def config(hf: Mapping[str, Any]) -> mla.MlaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "scoring_func", "softmax")
    # transformers ignores it, unlike the code of the checkpoints.
    refuse_unless(hf, "norm_topk_prob", False)
    base = deepseek.common(hf)
    kind = one_of(hf, "topk_method", METHODS)
    if not kind:
        return base
    return replace(base, grouping=deepseek.grouping(hf, base, kind, 1))


MODEL = replace(deepseek.MODEL, config=config)
