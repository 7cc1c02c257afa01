"""Blocks that models are composed of: ``(residual, delta) -> (residual, delta)``.

``delta`` is this rank's partial sum, neither reduced nor added yet: the next block's
first op does both, so that a fused kernel may lie across the border.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from inl.models.views import FULL, View
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.ops.protocol import Ops
from inl.ops.rope import RopeScaling
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group


class Attention(NamedTuple):
    """Groups of :func:`attention`, then their tensors."""

    norm: Norm | Group
    qkv: QkvLinear | Group
    out: Linear | Group
    q_norm: Norm | Group | None = None
    """Of each head of the queries by itself, [head_dim]."""
    k_norm: Norm | Group | None = None
    """Of each head of the keys by itself, [head_dim]."""


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


def embed(ops: Ops, config: Any, w: Embedding, step: Step) -> Carry:
    """Look the tokens up and prepare the rotation that every layer uses."""
    residual = ops.embedding(step.tokens, w)
    cos, sin = rotation(
        ops, config.head_dim, step, config.rope_theta, config.rope_scaling
    )
    return Carry(residual, ops.zeros_like(residual), cos, sin)


def rotation(
    ops: Ops, dim: int, step: Step, theta: float, scaling: RopeScaling
) -> tuple[Array, Array]:
    """Cosines and sines of the step's positions."""
    table: tuple[Array, Array] = ops.rope_table(
        step.positions, dim=dim, theta=theta, scaling=scaling
    )
    return table


def attention(
    ops: Ops,
    config: Any,
    w: Attention,
    carry: Carry,
    step: Step,
    state: State,
    *,
    index: int,
    view: View = FULL,
    sampled_step: Step | None = None,
) -> tuple[Carry, State]:
    """Grouped-query attention with rotary positions over the paged cache.

    With the step of the sampled tokens, residual and delta are theirs alone.
    """
    residual, q, k, v = ops.norm_qkv(
        carry.residual, carry.delta, w.norm, w.qkv, eps=config.norm_eps
    )
    q, k, v = split_heads((q, k, v), config.head_dim)
    q, k = norm_heads(ops, config, w, q, k)
    if sampled_step is not None:
        q, k = ops.rope(q, k, carry.cos, carry.sin)
        out, state = attend(
            ops, q, k, v, step, state, index=index, view=view,
            scale=config.head_dim**-0.5, sampled_step=sampled_step,
        )  # fmt: skip
        residual = ops.take_rows(residual, step.samples)
        delta = ops.linear(out, w.out)
        return carry._replace(residual=residual, delta=delta), state
    delta, cache = ops.attend_project(
        q, k, v, carry.cos, carry.sin, state.caches[index], step, w.out,
        scale=config.head_dim**-0.5, window=view.window, group=view.group,
    )  # fmt: skip
    caches = (*state.caches[:index], cache, *state.caches[index + 1 :])
    return (
        carry._replace(residual=residual, delta=delta),
        state._replace(caches=caches),
    )


def split_heads(parts: tuple[Array, ...], dim: int) -> tuple[Array, ...]:
    """Each of [T, N] as [T, heads, dim]."""
    return tuple(part.reshape(part.shape[0], -1, dim) for part in parts)


def norm_heads(
    ops: Ops, config: Any, w: Any, q: Array, k: Array
) -> tuple[Array, Array]:
    """Queries and keys [T, heads, dim], each head normed where the model does that."""
    if w.q_norm is not None:
        q = ops.rms_norm(q, w.q_norm, eps=config.norm_eps)
    if w.k_norm is not None:
        k = ops.rms_norm(k, w.k_norm, eps=config.norm_eps)
    return q, k


def attend(
    ops: Ops,
    q: Array,
    k: Array,
    v: Array,
    step: Step,
    state: State,
    *,
    index: int,
    view: View,
    scale: float,
    cap: float | None = None,
    sampled_step: Step | None = None,
) -> tuple[Array, State]:
    """Cache k and v as layer ``index`` does and attend: [T, heads * dim].

    With the step of the sampled tokens these alone do: [R, heads * dim].
    """
    cache = state.caches[index]
    if sampled_step is None:
        out, cache = ops.attend(
            q, k, v, cache, step,
            scale=scale, window=view.window, cap=cap, group=view.group,
        )  # fmt: skip
    else:
        cache = ops.write_kv(k, v, cache, step.writes[view.group])
        q = ops.take_rows(q, step.samples)
        out = ops.attention(
            q, cache, sampled_step,
            scale=scale, window=view.window, cap=cap, group=view.group,
        )  # fmt: skip
    caches = (*state.caches[:index], cache, *state.caches[index + 1 :])
    return out.reshape(out.shape[0], -1), state._replace(caches=caches)


def gated_mlp(ops: Ops, config: Any, w: Mlp, carry: Carry) -> Carry:
    """Gated feed-forward block."""
    residual, delta = ops.norm_mlp(
        carry.residual, carry.delta, w.norm, w.mlp,
        eps=config.norm_eps, activation=config.activation,
    )  # fmt: skip
    return carry._replace(residual=residual, delta=delta)


def head(
    ops: Ops, config: Any, norm: Norm, w: Linear, carry: Carry, step: Step
) -> Array:
    """Logits [S, V] of the sampled tokens: the last norm does the last add."""
    logits = ops.norm_logits(
        carry.residual, carry.delta, step.samples, norm, w, eps=config.norm_eps
    )
    return ops.all_gather(logits, axis="tensor")
