"""GLM-4-0414 (Zhipu, 2025): GLM with norms after each block too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inl.models import glm, groups, llama, mlp, post_norm
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


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


def layer(
    ops: Ops, c: llama.LlamaConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = post_norm.attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return post_norm.gated_mlp(ops, c, w.mlp, carry), state


MODEL = replace(
    llama.MODEL,
    config=glm.config,
    weights=weights,
    layer=layer,
    head=post_norm.gathered_head,
)
