"""Blocks that normalize their output (Gemma 2 and 3, OLMo 2).

The norm needs the sum over ranks, so these blocks reduce their output: ``delta`` is
already reduced, and the next block adds it without a reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import WeightMismatch
from inl.models import blocks
from inl.models.mlp import OpenMlp, feed_forward
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class Attention(NamedTuple):
    """Weights of an attention block: groups, replaced by tensors when loaded."""

    qkv: QkvLinear | Group
    out: Linear | Group
    post: Norm | Group | None
    """Applied to the block's output; ``None`` if the model has none."""
    norm: Norm | Group | None = None
    """Applied to the block's input; ``None`` if the model has none."""
    q_norm: Norm | Group | None = None
    k_norm: Norm | Group | None = None


class Mlp(NamedTuple):
    """Weights of :func:`gated_mlp`: groups, replaced by tensors when loaded."""

    mlp: GatedMlp | OpenMlp | Group
    post: Norm | Group | None
    norm: Norm | Group | None = None


def enter(
    ops: Ops, config: Any, carry: Any, norm: Norm | Group | None
) -> tuple[Array, Array]:
    """Add ``delta``; return the new residual and the block's input."""
    if norm is None:
        residual = carry.residual + carry.delta
        return residual, residual
    return ops.add_norm(carry.residual, carry.delta, norm, eps=config.norm_eps)


def leave(ops: Ops, config: Any, delta: Array, norm: Norm | Group | None) -> Array:
    """Return the block's output: reduced over ranks and normalized."""
    if norm is None:
        return ops.all_reduce(delta, axis="tensor")
    return ops.reduce_norm(delta, norm, eps=config.norm_eps)


def attention(
    ops: Ops,
    c: Any,
    w: Attention,
    carry: Any,
    step: Step,
    state: State,
    *,
    index: int,
    sampled_step: Step | None,
    cap: float | None = None,
    wide_norms: bool = False,
) -> tuple[Any, State]:
    """Attention block whose output is normalized.

    ``carry.tables(view)`` returns the rotation of the layer. cap: soft cap of scores.
    wide_norms: whether queries and keys are normalized over all heads together, which
    one rank must have.
    """
    view = c.views[index]
    residual, x = enter(ops, c, carry, w.norm)
    q, k, v = ops.qkv_linear(x, w.qkv)
    if wide_norms:
        if q.shape[-1] != c.heads * c.head_dim:
            raise WeightMismatch(
                f"queries: found {q.shape[-1]} of {c.heads * c.head_dim} elements on a "
                "rank; the model normalizes all heads together, accepted: 1 rank"
            )
        q, k = blocks.norm_heads(ops, c, w, q, k)
    q, k, v = blocks.split_heads((q, k, v), c.head_dim)
    if not wide_norms:
        q, k = blocks.norm_heads(ops, c, w, q, k)
    if view.rotated:
        q, k = ops.rope(q, k, *carry.tables(view))
    out, state = blocks.attend(
        ops, q, k, v, step, state,
        index=index, view=view, scale=c.attention_scale or c.head_dim**-0.5, cap=cap,
        sampled_step=sampled_step,
    )  # fmt: skip
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    delta = leave(ops, c, ops.linear(out, w.out), w.post)
    return carry._replace(residual=residual, delta=delta), state


def gated_mlp(ops: Ops, config: Any, w: Mlp, carry: Any) -> Any:
    """Gated feed-forward block."""
    residual, x = enter(ops, config, carry, w.norm)
    delta = feed_forward(ops, x, w.mlp, config.activation)
    return carry._replace(residual=residual, delta=leave(ops, config, delta, w.post))


def layer(
    ops: Ops, c: Any, w: Any, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    """Attention block of ``w.attention``, then the gated one of ``w.mlp``."""
    carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return gated_mlp(ops, c, w.mlp, carry), state


def head(
    ops: Ops, config: Any, norm: Norm | Group, w: Linear | Group, carry: Any, step: Step
) -> Array:
    """Logits [S, N] of the sampled tokens, for this rank's share of the vocabulary."""
    residual = ops.take_rows(carry.residual, step.samples)
    delta = ops.take_rows(carry.delta, step.samples)
    _, x = ops.add_norm(residual, delta, norm, eps=config.norm_eps)
    return ops.linear(x, w)


def gathered_head(ops: Ops, c: Any, w: Any, carry: Any, step: Step) -> Array:
    """Logits [S, V] of the sampled tokens, for the weights ``w`` of a model."""
    return ops.all_gather(head(ops, c, w.norm, w.head, carry, step), axis="tensor")
