"""GLM-4-0414 (Zhipu, 2025): GLM with norms after each block too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from inl.models import glm, groups, llama, mlp, post_norm

if TYPE_CHECKING:
    pass


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    return llama.Layer(
        post_norm.Attention(
            groups.qkv(c, at, bias=c.qkv_bias, interleaved=True),
            groups.out(c, at),
            groups.norm(f"{at}post_self_attn_layernorm", c.hidden_size),
            groups.norm(f"{at}input_layernorm", c.hidden_size),
        ),
        post_norm.Mlp(
            mlp.fused_weights(c, f"{at}mlp"),
            groups.norm(f"{at}post_mlp_layernorm", c.hidden_size),
            groups.norm(f"{at}post_attention_layernorm", c.hidden_size),
        ),
    )


MODEL = replace(
    llama.MODEL,
    config=glm.config,
    weights=weights,
    layer=post_norm.layer,
    head=post_norm.gathered_head,
)
