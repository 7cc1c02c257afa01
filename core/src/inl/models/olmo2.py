"""OLMo 2 (OLMo team, 2024): norms after the blocks and over all query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inl.errors import WeightMismatch
from inl.models import blocks, groups, llama, post_norm
from inl.models.config import refuse_unless
from inl.spec.cache import State
from inl.spec.step import Array, Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    refuse_unless(hf, "attention_bias", False)
    refuse_unless(hf, "clip_qkv", None)
    return llama.config(hf)


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
            q_norm=groups.norm(f"{at}self_attn.q_norm", c.heads * c.head_dim),
            k_norm=groups.norm(f"{at}self_attn.k_norm", c.kv_heads * c.head_dim),
        ),
        post_norm.Mlp(
            groups.gated_mlp(c, at),
            groups.norm(f"{at}post_feedforward_layernorm", c.hidden_size),
        ),
    )


def layer(
    ops: Ops, c: llama.LlamaConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = _attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return post_norm.gated_mlp(ops, c, w.mlp, carry), state


def _attention(
    ops: Ops,
    c: llama.LlamaConfig,
    w: post_norm.Attention,
    carry: Any,
    step: Step,
    state: State,
    *,
    index: int,
    sampled_step: Step | None,
) -> tuple[Any, State]:
    residual, x = post_norm.enter(ops, c, carry, w.norm)
    q, k, v = ops.qkv_linear(x, w.qkv)
    if q.shape[-1] != c.heads * c.head_dim:
        raise WeightMismatch(
            f"queries: found {q.shape[-1]} of {c.heads * c.head_dim} elements on a "
            "rank; OLMo 2 normalizes all heads together, accepted: 1 rank"
        )
    if w.q_norm is not None:
        q = ops.rms_norm(q, w.q_norm, eps=c.norm_eps)
    if w.k_norm is not None:
        k = ops.rms_norm(k, w.k_norm, eps=c.norm_eps)
    q, k, v = blocks.split_heads((q, k, v), c.head_dim)
    q, k = ops.rope(q, k, carry.cos, carry.sin)
    out, state = blocks.attend(
        ops, q, k, v, step, state,
        index=index, view=c.views[index], scale=c.head_dim**-0.5,
        sampled_step=sampled_step,
    )  # fmt: skip
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    delta = post_norm.leave(ops, c, ops.linear(out, w.out), w.post)
    return carry._replace(residual=residual, delta=delta), state


def head(ops: Ops, c: llama.LlamaConfig, w: Any, carry: Any, step: Step) -> Array:
    logits = post_norm.head(ops, c, w.norm, w.head, carry, step)
    return ops.all_gather(logits, axis="tensor")


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=layer, head=head)
