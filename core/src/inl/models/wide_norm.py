"""Attention whose queries and keys are normalized over all heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inl.errors import WeightMismatch
from inl.models import blocks, groups, llama, moe
from inl.spec.cache import State
from inl.spec.step import Step

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


def weights(c: Any, tree: llama.Weights) -> llama.Weights:
    """Return a tree with the norms of all heads of queries and keys."""

    def changed(at: str, layer: llama.Layer) -> llama.Layer:
        norms = {
            f"{name}_norm": groups.rotated_norm(f"{at}self_attn.{name}_norm", c, heads)
            for name, heads in (("q", c.heads), ("k", c.kv_heads))
        }
        return layer._replace(attention=layer.attention._replace(**norms))

    return llama.with_layers(tree, changed)


def layer(
    ops: Ops, c: Any, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Attention block, then experts or a dense feed-forward block."""
    residual, q, k, v = ops.norm_qkv(
        carry.residual, carry.delta, w.attention.norm, w.attention.qkv, eps=c.norm_eps
    )
    if q.shape[-1] != c.heads * c.head_dim:
        raise WeightMismatch(
            f"queries: found {q.shape[-1]} of {c.heads * c.head_dim} elements on a "
            "rank; the model normalizes all heads together, accepted: 1 rank"
        )
    q, k = blocks.norm_heads(ops, c, w.attention, q, k)
    carry, state = blocks.attend_heads(
        ops, c, w.attention._replace(q_norm=None, k_norm=None),
        carry._replace(residual=residual), (q, k, v), step, state, index=index,
        view=c.views[index], sampled_step=sampled_step,
    )  # fmt: skip
    return moe.feed_forward(ops, c, w.mlp, carry), state
