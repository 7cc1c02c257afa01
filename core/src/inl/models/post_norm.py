"""Blocks with a norm on what they give to the residual (Gemma 2 and 3, OLMo 2).

A norm needs the whole sum, so these blocks reduce over the ranks themselves: their
``delta`` is whole on every rank, and what follows adds it without reducing again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.ops.protocol import Ops
from inl.spec.step import Array, Step
from inl.spec.weights import Group


class Attention(NamedTuple):
    """Groups of an attention block, then their tensors."""

    qkv: QkvLinear | Group
    out: Linear | Group
    post: Norm | Group
    """Of what the block gives."""
    norm: Norm | Group | None = None
    """Of what the block takes, where the model has one."""
    q_norm: Norm | Group | None = None
    k_norm: Norm | Group | None = None


class Mlp(NamedTuple):
    """Groups of :func:`gated_mlp`, then their tensors."""

    mlp: GatedMlp | Group
    post: Norm | Group
    norm: Norm | Group | None = None


def enter(ops: Ops, config: Any, carry: Any, norm: Any) -> tuple[Array, Array]:
    """The new residual, and what the block computes on."""
    if norm is None:
        residual = carry.residual + carry.delta
        return residual, residual
    entered: tuple[Array, Array] = ops.add_norm(
        carry.residual, carry.delta, norm, eps=config.norm_eps
    )
    return entered


def leave(ops: Ops, config: Any, delta: Array, norm: Any) -> Array:
    """What the block gives: the sum of all ranks' parts, normed."""
    return ops.reduce_norm(delta, norm, eps=config.norm_eps)


def gated_mlp(ops: Ops, config: Any, w: Mlp, carry: Any) -> Any:
    """Gated feed-forward block."""
    residual, x = enter(ops, config, carry, w.norm)
    delta = ops.gated_mlp(x, w.mlp, activation=config.activation)
    return carry._replace(residual=residual, delta=leave(ops, config, delta, w.post))


def head(ops: Ops, config: Any, norm: Norm, w: Linear, carry: Any, step: Step) -> Array:
    """Logits [S, V'] of the sampled tokens, this rank's part of the vocabulary."""
    residual = ops.take_rows(carry.residual, step.samples)
    delta = ops.take_rows(carry.delta, step.samples)
    _, x = ops.add_norm(residual, delta, norm, eps=config.norm_eps)
    return ops.linear(x, w)
