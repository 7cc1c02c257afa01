"""OLMo 2 (OLMo team, 2024): norms after the blocks and over all query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inl.models import groups, llama, mlp, post_norm
from inl.models.config import refuse_unless
from inl.models.fields import with_defaults
from inl.models.rope import Rope, read_rope
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


DEFAULTS = {"rms_norm_eps": 1e-5}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    return with_rope(hf, read_rope(hf))


def with_rope(hf: Mapping[str, Any], rope: Rope) -> llama.LlamaConfig:
    """Read all but the rotation; raises :class:`CheckpointError` naming the field."""
    for name, accepted in (("mlp_bias", False), ("clip_qkv", None)):
        refuse_unless(hf, name, accepted)
    return llama.with_rope(hf, rope)


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: llama.LlamaConfig, at: str) -> llama.Layer:
    return llama.Layer(
        post_norm.Attention(
            groups.qkv(c, at, bias=c.qkv_bias),
            groups.out(c, at, bias=c.out_bias),
            groups.norm(f"{at}post_attention_layernorm", c.hidden_size),
            q_norm=groups.norm(f"{at}self_attn.q_norm", c.heads * c.head_dim),
            k_norm=groups.norm(f"{at}self_attn.k_norm", c.kv_heads * c.head_dim),
        ),
        post_norm.Mlp(
            mlp.weights(c, f"{at}mlp"),
            groups.norm(f"{at}post_feedforward_layernorm", c.hidden_size),
        ),
    )


def layer(
    ops: Ops, c: llama.LlamaConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = post_norm.attention(
        ops, c, w.attention, carry, step, state,
        index=index, sampled_step=sampled_step, wide_norms=True,
    )  # fmt: skip
    return post_norm.gated_mlp(ops, c, w.mlp, carry), state


MODEL = replace(
    llama.MODEL,
    config=config,
    weights=weights,
    layer=layer,
    head=post_norm.gathered_head,
)
