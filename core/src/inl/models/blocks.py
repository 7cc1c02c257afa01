"""Building blocks of decoder models: ``(residual, delta) -> (residual, delta)``.

``delta`` is this rank's partial sum of a block's output. The next block's first op
reduces it over ranks and adds it to the residual, so that a kernel may fuse the sum
with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.models.mlp import OpenMlp, feed_forward
from inl.models.views import FULL, View
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
from inl.ops.sink_attention import Sinks
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class Attention(NamedTuple):
    """Weights of :func:`attention`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    qkv: QkvLinear | Group
    out: Linear | Group
    q_norm: Norm | Group | None = None
    """[head_dim], applied to each query head."""
    k_norm: Norm | Group | None = None
    """[head_dim], applied to each key head."""
    sinks: Sinks | Group | None = None


class Mlp(NamedTuple):
    """Weights of :func:`gated_mlp`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    mlp: GatedMlp | OpenMlp | Group


class Carry(NamedTuple):
    """Activations passed from layer to layer."""

    residual: Array
    """[T, H]."""
    delta: Array
    """[T, H]: this rank's partial sum of the last block's output."""
    cos: Array
    """[T, head_dim / 2] float32."""
    sin: Array
    """[T, head_dim / 2] float32."""

    def tables(self, _view: View) -> tuple[Array, Array]:
        """Return the rotation tables of a layer: the same for all."""
        return self.cos, self.sin


class LocalCarry(NamedTuple):
    """Activations of a model whose layers with a window rotate differently."""

    residual: Array
    delta: Array
    cos: Array
    sin: Array
    local_cos: Array
    """``cos`` and ``sin`` of layers with a window."""
    local_sin: Array

    def tables(self, view: View) -> tuple[Array, Array]:
        """Return the rotation tables of a layer."""
        return local_tables(self, view)


def local_tables(carry: Any, view: View) -> tuple[Array, Array]:
    """Return the rotation tables of a layer whose kind has its own."""
    if view.window is None:
        return carry.cos, carry.sin
    return carry.local_cos, carry.local_sin


def embed_local(ops: Ops, config: Any, w: Embedding | Group, step: Step) -> LocalCarry:
    """Look up the embeddings and compute both rotation tables."""
    carry = embed(ops, config, w, step)
    local = carry.cos, carry.sin
    if config.local_rope is not None:
        local = rotation(ops, config.head_dim, step, *config.local_rope)
    return LocalCarry(*carry, *local)


def embed(ops: Ops, config: Any, w: Embedding | Group, step: Step) -> Carry:
    """Look up the embeddings and compute the rotation tables of all layers."""
    residual = ops.embedding(step.tokens, w)
    cos, sin = rotation(
        ops, config.head_dim, step, config.rope_theta, config.rope_scaling
    )
    return Carry(residual, ops.zeros_like(residual), cos, sin)


def rotation(
    ops: Ops, dim: int, step: Step, theta: float, scaling: RopeScaling
) -> tuple[Array, Array]:
    """Return cosines and sines of the step's positions, [T, dim / 2] each."""
    return ops.rope_table(step.positions, dim=dim, theta=theta, scaling=scaling)


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
    """Grouped-query attention block with rotary positions over the paged cache.

    With ``sampled_step``, the returned residual and delta are those of the sampled
    tokens, [R, H].
    """
    residual, *projected = ops.norm_qkv(
        carry.residual, carry.delta, w.norm, w.qkv, eps=config.norm_eps
    )
    return attend_heads(
        ops, config, w, carry._replace(residual=residual), projected, step, state,
        index=index, view=view, sampled_step=sampled_step,
    )  # fmt: skip


def attend_heads(
    ops: Ops,
    config: Any,
    w: Any,
    carry: Carry,
    projected: Sequence[Array],
    step: Step,
    state: State,
    *,
    index: int,
    view: View,
    sampled_step: Step | None,
) -> tuple[Carry, State]:
    """Attention block after the projection to queries, keys and values [T, N].

    ``carry.residual`` is the new residual, ``w`` as in :class:`Attention`.
    """
    residual = carry.residual
    q, k, v = split_heads(projected, config.head_dim)
    q, k = norm_heads(ops, config, w, q, k)
    scale = config.attention_scale or config.head_dim**-0.5
    if sampled_step is not None or not view.rotated or w.sinks is not None:
        if view.rotated:
            q, k = ops.rope(q, k, carry.cos, carry.sin)
        out, state = attend(
            ops, q, k, v, step, state, index=index, view=view,
            scale=scale, sampled_step=sampled_step, sinks=w.sinks,
        )  # fmt: skip
        if sampled_step is not None:
            residual = ops.take_rows(residual, step.samples)
        delta = ops.linear(out, w.out)
        return carry._replace(residual=residual, delta=delta), state
    delta, cache = ops.attend_project(
        q, k, v, carry.cos, carry.sin, state.caches[index], step, w.out,
        scale=scale, window=view.window, group=view.group,
    )  # fmt: skip
    caches = (*state.caches[:index], cache, *state.caches[index + 1 :])
    return (
        carry._replace(residual=residual, delta=delta),
        state._replace(caches=caches),
    )


def layer(
    feed_forward: Callable[[Ops, Any, Any, Carry], Carry], ops: Ops, config: Any,
    w: Any, carry: Any, step: Step, state: State, *, index: int,
    sampled_step: Step | None = None,
) -> tuple[Carry, State]:  # fmt: skip
    """Attention block of ``w.attention``, then ``feed_forward`` of ``w.mlp``."""
    carry, state = attention(
        ops, config, w.attention, carry, step, state, index=index,
        view=config.views[index], sampled_step=sampled_step,
    )  # fmt: skip
    return feed_forward(ops, config, w.mlp, carry), state


def split_heads(parts: Sequence[Array], dim: int) -> tuple[Array, ...]:
    """Reshape each of [T, N] to [T, heads, dim]."""
    return tuple(part.reshape(part.shape[0], -1, dim) for part in parts)


def norm_heads(
    ops: Ops, config: Any, w: Any, q: Array, k: Array
) -> tuple[Array, Array]:
    """Normalize each head of q and k [T, heads, dim] if the model has such norms."""
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
    sinks: Sinks | Group | None = None,
) -> tuple[Array, State]:
    """Write k and v to the cache of layer ``index`` and compute attention.

    Returns [T, heads * dim] and the state; with ``sampled_step``, [R, heads * dim] of
    the sampled tokens.
    """
    cache = state.caches[index]
    if sinks is not None:
        cache = ops.write_kv(k, v, cache, step.writes[view.group])
        if sampled_step is not None:
            q, step = ops.take_rows(q, step.samples), sampled_step
        out = ops.sink_attention(
            q, cache, step, sinks, scale=scale, window=view.window, group=view.group
        )
    elif sampled_step is None:
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
    if isinstance(w.mlp, OpenMlp):
        residual, x = ops.reduce_add_norm(
            carry.residual, carry.delta, w.norm, eps=config.norm_eps
        )
        delta = feed_forward(ops, x, w.mlp, config.activation)
        return carry._replace(residual=residual, delta=delta)
    residual, delta = ops.norm_mlp(
        carry.residual, carry.delta, w.norm, w.mlp,
        eps=config.norm_eps, activation=config.activation,
    )  # fmt: skip
    return carry._replace(residual=residual, delta=delta)


def head(
    ops: Ops,
    config: Any,
    norm: Norm | Group,
    w: Linear | Group,
    carry: Carry,
    step: Step,
) -> Array:
    """Logits [S, V] of the sampled tokens; the last norm adds the last delta."""
    logits = ops.norm_logits(
        carry.residual, carry.delta, step.samples, norm, w, eps=config.norm_eps
    )
    return ops.all_gather(logits, axis="tensor")
