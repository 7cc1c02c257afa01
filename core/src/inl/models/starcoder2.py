"""StarCoder2 (BigCode, 2024): layer norms, biases, feed-forward without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from inl.models import layer_norm, llama, mlp
from inl.models.config import MAX_EPS, flag, number, refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.views import one_window, views

DEFAULTS: Final = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": None,
    "tie_word_embeddings": True,
}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name in ("layer_types", "mlp_type"):
        refuse_unless(hf, name, {"layer_types": None, "mlp_type": "default"}[name])
    bias = flag(hf, "use_bias", True)
    eps = number(hf, "norm_epsilon", 1e-5, most=MAX_EPS)
    hf = changed(hf, attention_bias=bias, mlp_bias=bias, rms_norm_eps=eps)
    base = llama.config(hf)
    return replace(base, views=views(one_window(hf, base.layers, base.max_tokens)))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""

    def inner(stem: str) -> mlp.OpenMlp:
        return mlp.ungated(c, f"{stem}.c_fc", f"{stem}.c_proj")

    return layer_norm.weights(c, inner)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer_norm.layer,
    head=layer_norm.head,
)  # fmt: skip
