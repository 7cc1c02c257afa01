"""Persimmon (Adept, 2023), and the text of Fuyu: layer norms of heads, squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, gpt_neox, groups, layer_norm, llama
from inl.models.config import MAX_EPS, flag, number
from inl.models.fields import changed, with_defaults
from inl.models.rope import rope_fields
from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import LayerNorm
from inl.spec.cache import State
from inl.spec.step import Step
from inl.spec.weights import Group, Param, RowSlices

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "hidden_act": "relu2", "max_position_embeddings": 16384,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
RENAMES: Final = {
    r"^model\.final_layernorm\.": "model.norm.",
    r"\.self_attn\.dense\.": ".self_attn.o_proj.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


@dataclass(frozen=True, slots=True)
class PersimmonConfig(llama.LlamaConfig):
    """Sizes and constants of one checkpoint."""

    normed_heads: bool = True
    """Whether each head of queries and keys is normalized."""


class Attention(NamedTuple):
    """Weights of an attention block: groups, replaced by tensors when loaded."""

    norm: LayerNorm | Group
    qkv: QkvLinear | Group
    out: Linear | Group
    head_norms: tuple[LayerNorm | Group, LayerNorm | Group] | None
    """Of queries and of keys."""
    q_norm: None = None
    k_norm: None = None
    sinks: None = None


def config(hf: Mapping[str, Any]) -> PersimmonConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    eps = number(hf, "layer_norm_eps", 1e-5, most=MAX_EPS)
    hf = changed(
        hf, rms_norm_eps=eps, attention_bias=True, mlp_bias=True, head_dim=None,
        num_key_value_heads=None,
    )  # fmt: skip
    base = llama.partly_rotated(hf, rope_fields(hf))
    normed = flag(hf, "qk_layernorm", True)
    return llama.extended(PersimmonConfig, base, normed_heads=normed)


def weights(c: PersimmonConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    lanes = c.rope_scaling.rotary_dim
    order = RowSlices(groups.rotary_rows(c.head_dim, lanes, 1), c.head_dim)

    def norm(name: str) -> Group:
        params = {
            part: Param(f"{name}.{part}", (c.head_dim,), row_slices=order)
            for part in ("weight", "bias")
        }
        return Group("layer_norm", **params)

    def altered(at: str, layer: llama.Layer) -> llama.Layer:
        old = layer.attention
        norms = norm(f"{at}self_attn.q_layernorm"), norm(f"{at}self_attn.k_layernorm")
        new = Attention(old.norm, old.qkv, old.out, norms if c.normed_heads else None)
        return layer._replace(attention=new)

    return llama.with_layers(layer_norm.weights(c, gpt_neox.inner(c)), altered)


def layer(
    ops: Ops, c: PersimmonConfig, w: llama.Layer, carry: Any, step: Step, state: State,
    *, index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    residual, x = layer_norm.enter(ops, c, carry, w.attention.norm)
    q, k, v = blocks.split_heads(ops.qkv_linear(x, w.attention.qkv), c.head_dim)
    if w.attention.head_norms is not None:
        first, second = w.attention.head_norms
        q = ops.layer_norm(q, first, eps=c.norm_eps)
        k = ops.layer_norm(k, second, eps=c.norm_eps)
    carry, state = blocks.attend_heads(
        ops, c, w.attention, carry._replace(residual=residual), (q, k, v), step, state,
        index=index, view=c.views[index], sampled_step=sampled_step,
    )  # fmt: skip
    return layer_norm.feed_forward_block(ops, c, w.mlp, carry), state


def adapt(
    c: PersimmonConfig, checkpoint: Checkpoint
) -> tuple[PersimmonConfig, AdaptedCheckpoint]:
    """Give tensors the names of :func:`weights`."""
    return c, gpt_neox.separated(checkpoint, RENAMES, c.heads)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, layer=layer, head=layer_norm.head,
    adapt=adapt,
)  # fmt: skip
