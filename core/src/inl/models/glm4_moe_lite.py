"""GLM-4.7-Flash (Zhipu, 2026): the latent attention and experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.checkpoints.files.tensor_file import show
from inl.errors import CheckpointError
from inl.models import deepseek_v3, mla
from inl.models.fields import changed, with_defaults

DEFAULTS: Final = {
    "num_key_value_heads": 20, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
    "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.8,
}  # fmt: skip
"""Defaults of config fields that differ from those of DeepSeek-V3."""
KINDS: Final = ("dense", "sparse")
"""Accepted entries of ``mlp_layer_types``."""


def config(hf: Mapping[str, Any]) -> mla.MlaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    hf.get("first_k_dense_replace")  # which transformers does not read
    base = deepseek_v3.config(changed(hf, first_k_dense_replace=1))
    types = hf.get("mlp_layer_types")
    if types is None:
        return base
    known = isinstance(types, (list, tuple)) and len(types) == base.layers
    if not known or any(kind not in KINDS for kind in types):
        raise CheckpointError(
            f"config field 'mlp_layer_types': found {show(types)}, expected a list of "
            f"{base.layers}, {' or '.join(KINDS)} for each layer"
        )
    dense = (index for index, kind in enumerate(types) if kind == "dense")
    return replace(base, dense_layers=tuple(dense))


MODEL = replace(deepseek_v3.MODEL, config=config)
