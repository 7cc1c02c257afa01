"""Base of Gemma 2 and 3: four norms per layer, scaled embeddings, capped logits.

Checkpoints store norm weights minus 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.dtypes import rounded
from inl.models import blocks, groups, llama, post_norm
from inl.models.config import cap, refuse_unless, whole
from inl.models.views import views, windows
from inl.ops.rope import RopeScaling
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

HEAD_DIM = 256
"""Default of ``head_dim``."""

GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class GemmaConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    attention_scale: float = 1.0
    attention_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float = 1.0
    norm_offset: float = 1.0
    local_rope: tuple[float, RopeScaling] | None = None
    """Base frequency and scaling of layers with a window, if they differ."""


class Carry(NamedTuple):
    """Activations passed from layer to layer; ``delta`` is reduced over ranks."""

    residual: Array
    delta: Array
    cos: Array
    sin: Array
    local_cos: Array
    """``cos`` and ``sin`` of layers with a window."""
    local_sin: Array


def config(
    hf: Mapping[str, Any],
    *,
    kinds: Any,
    caps: tuple[float | None, float | None],
    head_norm: bool = False,
    local_rope: tuple[float, RopeScaling] | None = None,
) -> GemmaConfig:
    """Read the fields of both generations; raises ``CheckpointError`` naming the field.

    kinds: (number of layers) -> default layer types. caps: default soft caps of
    attention scores and of logits.
    """
    refuse_unless(hf, "attention_bias", False)
    refuse_unless(hf, "use_bidirectional_attention", False)
    refuse_unless(hf, "hidden_activation", GELU)
    given = {"hidden_act": GELU, "head_dim": hf.get("head_dim") or HEAD_DIM}
    tied = {"tie_word_embeddings": hf.get("tie_word_embeddings", True)}
    base = llama.config({**hf, **given, **tied})
    layer_windows = windows(hf, kinds(base.layers))
    known = {field.name: getattr(base, field.name) for field in fields(base)}
    return GemmaConfig(
        **known | {"views": views(layer_windows), "head_norm": head_norm},
        attention_scale=whole(hf, "query_pre_attn_scalar", HEAD_DIM) ** -0.5,
        attention_cap=cap(hf, "attn_logit_softcapping", caps[0]),
        logit_cap=cap(hf, "final_logit_softcapping", caps[1]),
        embed_scale=base.hidden_size**0.5,
        local_rope=local_rope,
    )


def weights(c: GemmaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return llama.Weights(
        embed=groups.table(c),
        layers=tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers)),
        norm=groups.norm("model.norm", c.hidden_size, offset=c.norm_offset),
        head=groups.head(c),
    )


def _layer(c: GemmaConfig, at: str) -> llama.Layer:
    def norm(name: str, size: int = c.hidden_size) -> Group:
        return groups.norm(f"{at}{name}", size, offset=c.norm_offset)

    heads = {
        f"{name}_norm": norm(f"self_attn.{name}_norm", c.head_dim)
        for name in ("qk" if c.head_norm else "")
    }
    return llama.Layer(
        post_norm.Attention(
            groups.qkv(c, at),
            groups.out(c, at),
            norm("post_attention_layernorm"),
            norm("input_layernorm"),
            **heads,
        ),
        post_norm.Mlp(
            groups.gated_mlp(c, at),
            norm("post_feedforward_layernorm"),
            norm("pre_feedforward_layernorm"),
        ),
    )


def embed(ops: Ops, c: GemmaConfig, w: llama.Weights, step: Step) -> Carry:
    carry = blocks.embed(ops, c, w.embed, step)
    # transformers rounds the factor to the storage dtype before it multiplies.
    scale = float(rounded(np.array(c.embed_scale, np.float32), c.dtype))
    local = carry.cos, carry.sin
    if c.local_rope is not None:
        local = blocks.rotation(ops, c.head_dim, step, *c.local_rope)
    return Carry(carry.residual * scale, carry.delta, carry.cos, carry.sin, *local)


def layer(
    ops: Ops, c: GemmaConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = _attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return post_norm.gated_mlp(ops, c, w.mlp, carry), state


def _attention(
    ops: Ops,
    c: GemmaConfig,
    w: post_norm.Attention,
    carry: Carry,
    step: Step,
    state: State,
    *,
    index: int,
    sampled_step: Step | None,
) -> tuple[Carry, State]:
    view = c.views[index]
    residual, x = post_norm.enter(ops, c, carry, w.norm)
    q, k, v = blocks.split_heads(ops.qkv_linear(x, w.qkv), c.head_dim)
    q, k = blocks.norm_heads(ops, c, w, q, k)
    local = carry.local_cos, carry.local_sin
    table = (carry.cos, carry.sin) if view.window is None else local
    q, k = ops.rope(q, k, *table)
    out, state = blocks.attend(
        ops, q, k, v, step, state,
        index=index, view=view, scale=c.attention_scale, cap=c.attention_cap,
        sampled_step=sampled_step,
    )  # fmt: skip
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    delta = post_norm.leave(ops, c, ops.linear(out, w.out), w.post)
    return carry._replace(residual=residual, delta=delta), state


def head(ops: Ops, c: GemmaConfig, w: Any, carry: Any, step: Step) -> Array:
    logits = post_norm.head(ops, c, w.norm, w.head, carry, step)
    if c.logit_cap is not None:
        logits = ops.soft_cap(logits, cap=c.logit_cap)
    return ops.all_gather(logits, axis="tensor")
