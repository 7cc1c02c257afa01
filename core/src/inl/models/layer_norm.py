"""Blocks of models with layer norms, which no kernel fuses with their neighbors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from inl.models import blocks
from inl.models.mlp import OpenMlp
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import LayerNorm
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class Attention(NamedTuple):
    """Weights of an attention block: groups, replaced by tensors when loaded."""

    norm: LayerNorm | Group
    qkv: QkvLinear | Group
    out: Linear | Group
    q_norm: None = None
    k_norm: None = None
    sinks: None = None


class Mlp(NamedTuple):
    """Weights of a feed-forward block; no norm if it shares that of attention."""

    mlp: GatedMlp | OpenMlp | Group
    norm: LayerNorm | Group | None = None


def norm(name: str, size: int, *, bias: bool) -> Group:
    """Return a layer norm of ``size`` elements."""
    params = {"weight": Param(f"{name}.weight", (size,))}
    if bias:
        params["bias"] = Param(f"{name}.bias", (size,))
    return Group("layer_norm", **params)


def enter(
    ops: Ops, c: Any, carry: blocks.Carry, w: LayerNorm | Group
) -> tuple[Array, Array]:
    """Reduce and add ``delta``; return the new residual and the block's input."""
    residual = carry.residual + ops.all_reduce(carry.delta, axis="tensor")
    return residual, ops.layer_norm(residual, w, eps=c.norm_eps)


def attention(
    ops: Ops, c: Any, w: Attention, carry: blocks.Carry, step: Step, state: State, *,
    index: int, sampled_step: Step | None,
) -> tuple[Array, blocks.Carry, State]:  # fmt: skip
    """Attention block; returns its normalized input too, then as blocks.attention."""
    residual, x = enter(ops, c, carry, w.norm)
    carry, state = blocks.attend_heads(
        ops, c, w, carry._replace(residual=residual), ops.qkv_linear(x, w.qkv), step,
        state, index=index, view=c.views[index], sampled_step=sampled_step,
    )  # fmt: skip
    return x, carry, state


def head(ops: Ops, c: Any, w: Any, carry: blocks.Carry, step: Step) -> Array:
    """Logits [S, V] of the sampled tokens, for the weights ``w`` of a model."""
    sampled = carry._replace(
        residual=ops.take_rows(carry.residual, step.samples),
        delta=ops.take_rows(carry.delta, step.samples),
    )
    _, x = enter(ops, c, sampled, w.norm)
    return ops.all_gather(ops.linear(x, w.head), axis="tensor")
