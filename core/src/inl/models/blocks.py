"""Blocks that models are composed of: ``(residual, delta) -> (residual, delta)``.

``delta`` is this rank's partial sum, neither reduced nor added yet: the next block's
first op does both, so that a fused kernel may lie across the border.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from inl.ops.embedding import Embedding
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.values import Array, Group, State, Step


class Attention(NamedTuple):
    """Groups of :func:`attention`, then their tensors."""

    norm: Norm | Group
    qkv: QkvLinear | Group
    out: Linear | Group


class Mlp(NamedTuple):
    """Groups of :func:`gated_mlp`, then their tensors."""

    norm: Norm | Group
    mlp: GatedMlp | Group


class Carry(NamedTuple):
    """What flows from layer to layer."""

    residual: Array
    """[T, H]."""
    delta: Array
    """[T, H]: this rank's part of what the last block adds."""
    cos: Array
    """[T, head_dim / 2] float32."""
    sin: Array
    """[T, head_dim / 2] float32."""


def embed(ops: Any, config: Any, w: Embedding, step: Step) -> Carry:
    """Look the tokens up and prepare the rotation that every layer uses."""
    residual = ops.embedding(step.tokens, w)
    cos, sin = ops.rope_table(
        step.positions,
        dim=config.head_dim,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
    )
    return Carry(residual, ops.zeros_like(residual), cos, sin)


def attention(
    ops: Any,
    config: Any,
    w: Attention,
    carry: Carry,
    step: Step,
    state: State,
    *,
    index: int,
) -> tuple[Carry, State]:
    """Grouped-query attention with rotary positions over the paged cache."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=config.norm_eps
    )
    q, k, v = ops.qkv_linear(x, w.qkv)
    dim = config.head_dim
    q, k, v = (part.reshape(part.shape[0], -1, dim) for part in (q, k, v))
    q, k = ops.rope(q, k, carry.cos, carry.sin)
    out, cache = ops.attend(q, k, v, state.caches[index], step, scale=dim**-0.5)
    delta = ops.linear(out.reshape(out.shape[0], -1), w.out)
    caches = (*state.caches[:index], cache, *state.caches[index + 1 :])
    return (
        carry._replace(residual=residual, delta=delta),
        state._replace(caches=caches),
    )


def gated_mlp(ops: Any, config: Any, w: Mlp, carry: Carry) -> Carry:
    """Gated feed-forward block."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=config.norm_eps
    )
    delta = ops.gated_mlp(x, w.mlp, activation=config.activation)
    return carry._replace(residual=residual, delta=delta)


def head(
    ops: Any, config: Any, norm: Norm, w: Linear, carry: Carry, step: Step
) -> Array:
    """Logits [S, V] of the sampled tokens: the last norm does the last add."""
    residual = ops.take_rows(carry.residual, step.samples)
    delta = ops.take_rows(carry.delta, step.samples)
    _, x = ops.reduce_add_norm(residual, delta, norm, eps=config.norm_eps)
    return ops.all_gather(ops.linear(x, w), axis="tensor")
