"""Base of Gemma 2 and 3: four norms per layer, scaled embeddings, capped logits.

Checkpoints store norm weights minus 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import rounded
from inl.models import blocks, groups, llama, mlp, post_norm
from inl.models.config import cap, refuse_unless, whole
from inl.models.fields import changed
from inl.models.rope import Rope
from inl.models.views import views, windows
from inl.ops.rope import RopeScaling
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

HEAD_DIM = 256
"""Default of ``head_dim`` and of the scale of attention scores."""

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Defaults of config fields that differ from Llama's."""

GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class GemmaConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    attention_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float = 1.0
    norm_offset: float = 1.0
    local_rope: tuple[float, RopeScaling] | None = None
    """Base frequency and scaling of layers with a window, if they differ."""


def config(
    hf: Mapping[str, Any],
    *,
    rope: Rope,
    kinds: Any,
    attention_cap: float | None,
    logit_cap: float | None,
    head_norm: bool = False,
    local_rope: tuple[float, RopeScaling] | None = None,
) -> GemmaConfig:
    """Read the fields of both generations; raises ``CheckpointError`` naming the field.

    rope: rotation of layers without a window. kinds: (number of layers) -> default
    layer types. attention_cap: soft cap of attention scores. logit_cap: default of the
    soft cap of logits.
    """
    refuse_unless(hf, "mlp_bias", False)
    refuse_unless(hf, "use_bidirectional_attention", False)
    refuse_unless(hf, "hidden_activation", GELU)
    base = llama.with_rope(changed(hf, hidden_act=GELU), rope)
    layer_windows = windows(hf, kinds(base.layers))
    return llama.extended(
        GemmaConfig,
        base,
        views=views(layer_windows),
        head_norm=head_norm,
        attention_scale=whole(hf, "query_pre_attn_scalar", HEAD_DIM) ** -0.5,
        attention_cap=attention_cap,
        logit_cap=cap(hf, "final_logit_softcapping", logit_cap),
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
            groups.qkv(c, at, bias=c.qkv_bias),
            groups.out(c, at, bias=c.out_bias),
            norm("post_attention_layernorm"),
            norm("input_layernorm"),
            **heads,
        ),
        post_norm.Mlp(
            mlp.weights(c, f"{at}mlp"),
            norm("post_feedforward_layernorm"),
            norm("pre_feedforward_layernorm"),
        ),
    )


def embed(ops: Ops, c: GemmaConfig, w: llama.Weights, step: Step) -> Any:
    carry = blocks.embed_local(ops, c, w.embed, step)
    # transformers rounds the factor to the storage dtype before it multiplies.
    scale = float(rounded(np.array(c.embed_scale, np.float32), c.dtype))
    return carry._replace(residual=carry.residual * scale)


def layer(
    ops: Ops, c: GemmaConfig, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = post_norm.attention(
        ops, c, w.attention, carry, step, state,
        index=index, sampled_step=sampled_step, cap=c.attention_cap,
    )  # fmt: skip
    return post_norm.gated_mlp(ops, c, w.mlp, carry), state


def head(ops: Ops, c: GemmaConfig, w: Any, carry: Any, step: Step) -> Array:
    logits = post_norm.head(ops, c, w.norm, w.head, carry, step)
    if c.logit_cap is not None:
        logits = ops.soft_cap(logits, cap=c.logit_cap)
    return ops.all_gather(logits, axis="tensor")
