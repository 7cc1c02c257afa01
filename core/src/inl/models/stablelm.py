"""StableLM 2 (Stability AI, 2024): layer norms, a quarter of the lanes rotates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from inl.models import layer_norm, llama, mlp
from inl.models.config import MAX_EPS, flag, number, refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.rope import rope_fields

DEFAULTS: Final = {
    "num_key_value_heads": 32, "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name in ("use_parallel_residual", "qk_layernorm"):
        refuse_unless(hf, name, False)
    eps = number(hf, "layer_norm_eps", 1e-5, most=MAX_EPS)
    hf = changed(
        hf, rms_norm_eps=eps, attention_bias=False, mlp_bias=False, head_dim=None
    )
    base = llama.partly_rotated(hf, rope_fields(hf))
    return replace(base, qkv_bias=flag(hf, "use_qkv_bias", False))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return layer_norm.weights(c, partial(mlp.weights, c))


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer_norm.layer,
    head=layer_norm.head,
)  # fmt: skip
