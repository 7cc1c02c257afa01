"""EXAONE 4.0 (LG AI Research, 2025): norms after the blocks, and of each head.

Of a model with windows, layers without one do not rotate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inl.models import groups, llama, mlp, post_norm
from inl.models.config import refuse_unless, whole
from inl.models.fields import with_defaults
from inl.models.views import one_full_in, views, windows

if TYPE_CHECKING:
    pass

DEFAULTS: Final = {
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
PERIOD: Final = 4
"""Default period of layers without a window."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name in ("attention_bias", "mlp_bias"):
        refuse_unless(hf, name, False)
    base = llama.config(hf)
    kinds = ["full_attention"] * base.layers
    windowed = hf.get("sliding_window") is not None
    if windowed:
        period = whole(hf, "sliding_window_pattern", PERIOD)
        kinds = one_full_in(base.layers, period=period)
    spans = windows(hf, kinds)
    turned = [span is not None or not windowed for span in spans]
    return replace(base, views=views(spans, turned))


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    return llama.Layer(
        post_norm.Attention(
            groups.qkv(c, at),
            groups.out(c, at),
            groups.norm(f"{at}post_attention_layernorm", c.hidden_size),
            q_norm=groups.norm(f"{at}self_attn.q_norm", c.head_dim),
            k_norm=groups.norm(f"{at}self_attn.k_norm", c.head_dim),
        ),
        post_norm.Mlp(
            mlp.weights(c, f"{at}mlp"),
            groups.norm(f"{at}post_feedforward_layernorm", c.hidden_size),
        ),
    )


MODEL = replace(
    llama.MODEL,
    config=config,
    weights=weights,
    layer=post_norm.layer,
    head=post_norm.gathered_head,
)
