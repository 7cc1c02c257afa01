"""Hunyuan (Tencent, 2025), dense: Llama with norms of heads after their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inl.models import blocks, groups, llama, moe
from inl.models.config import number
from inl.models.fields import with_defaults
from inl.models.rope import kind_of, read_rope, rope_fields
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
"""Defaults of config fields that differ from Llama's."""


def config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    rope = read_rope(hf)
    base = llama.with_rope(hf, rope)
    fields = rope_fields(hf)
    if kind_of(fields) == "dynamic" and fields.get("alpha"):
        # Despite its name, the base is the same for every length.
        share = base.head_dim / (base.head_dim - 2)
        gain = number(fields, "alpha", 1.0) ** share
        base = replace(base, rope_theta=base.rope_theta * gain)
    return base


def weights(c: llama.LlamaConfig) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return with_norms(c, llama.weights(c))


def with_norms(c: llama.LlamaConfig, tree: llama.Weights) -> llama.Weights:
    """Return a tree with the norms of heads."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        norms = {
            f"{name[0]}_norm": groups.norm(
                f"{at}self_attn.{name}_layernorm", c.head_dim
            )
            for name in ("query", "key")
        }
        return layer._replace(attention=layer.attention._replace(**norms))

    return llama.with_layers(tree, changed)


def layer(
    ops: Ops, c: Any, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return moe.feed_forward(ops, c, w.mlp, carry), state


def attention(
    ops: Ops, c: llama.LlamaConfig, w: blocks.Attention, carry: Any, step: Step,
    state: State, *, index: int, sampled_step: Step | None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Attention block whose heads are rotated, then normalized."""
    residual, *projected = ops.norm_qkv(
        carry.residual, carry.delta, w.norm, w.qkv, eps=c.norm_eps
    )
    q, k, v = blocks.split_heads(projected, c.head_dim)
    q, k = blocks.norm_heads(ops, c, w, *ops.rope(q, k, carry.cos, carry.sin))
    return blocks.attend_heads(
        ops, c, w._replace(q_norm=None, k_norm=None), carry._replace(residual=residual),
        (q, k, v), step, state, index=index,
        view=c.views[index]._replace(rotated=False), sampled_step=sampled_step,
    )  # fmt: skip


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=layer)
