"""Blocks of models with layer norms, which no kernel fuses with their neighbors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.models import blocks, groups, llama
from inl.models.mlp import OpenMlp, feed_forward
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


def norm(name: str, size: int, *, bias: bool, offset: float = 0.0) -> Group:
    """Return a layer norm of ``size`` elements; ``offset`` is added to the weight."""
    params = {"weight": Param(f"{name}.weight", (size,), offset=offset)}
    if bias:
        params["bias"] = Param(f"{name}.bias", (size,))
    return Group("layer_norm", **params)


def weights(
    c: Any, inner: Callable[[str], Any], *, offset: float = 0.0, bias: bool = True,
    shared: bool = False,
) -> llama.Weights:  # fmt: skip
    """Return a tree with norms before the blocks, by Hugging Face tensor names.

    inner: returns the feed-forward layer of a module. offset, bias: of norms. shared:
    whether both blocks read one norm.
    """

    def named(name: str) -> Group:
        return norm(name, c.hidden_size, bias=bias, offset=offset)

    layers = tuple(
        llama.Layer(
            Attention(
                named(f"{at}input_layernorm"),
                groups.qkv(c, at, bias=c.qkv_bias),
                groups.out(c, at, bias=c.out_bias),
            ),
            Mlp(
                inner(f"{at}mlp"),
                None if shared else named(f"{at}post_attention_layernorm"),
            ),
        )
        for at in (f"model.layers.{index}." for index in range(c.layers))
    )
    tree = llama.weights(replace(c, layers=0))
    return tree._replace(layers=layers, norm=named("model.norm"))


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


def layer(
    ops: Ops, c: Any, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Attention block, then feed-forward block."""
    _, carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    return feed_forward_block(ops, c, w.mlp, carry), state


def feed_forward_block(ops: Ops, c: Any, w: Mlp, carry: blocks.Carry) -> blocks.Carry:
    """Feed-forward block with a norm of its own."""
    assert w.norm is not None, "a block that shares a norm is not one of its own"
    residual, x = enter(ops, c, carry, w.norm)
    delta = feed_forward(ops, x, w.mlp, c.activation)
    return carry._replace(residual=residual, delta=delta)


def parallel_layer(
    ops: Ops, c: Any, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Attention and feed-forward block of the same residual.

    The feed-forward block reads the norm of attention unless it has one of its own.
    """
    x, carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    if w.mlp.norm is not None:
        x = ops.layer_norm(carry.residual, w.mlp.norm, eps=c.norm_eps)
    elif sampled_step is not None:
        x = ops.take_rows(x, step.samples)
    delta = carry.delta + feed_forward(ops, x, w.mlp.mlp, c.activation)
    return carry._replace(delta=delta), state


def head(ops: Ops, c: Any, w: Any, carry: blocks.Carry, step: Step) -> Array:
    """Logits [S, V] of the sampled tokens, for the weights ``w`` of a model."""
    sampled = carry._replace(
        residual=ops.take_rows(carry.residual, step.samples),
        delta=ops.take_rows(carry.delta, step.samples),
    )
    _, x = enter(ops, c, sampled, w.norm)
    return ops.all_gather(ops.linear(x, w.head), axis="tensor")
