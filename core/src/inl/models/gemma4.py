"""Gemma 4 text model (Gemma team, 2026), dense or with experts beside a dense layer.

Layers without a window have larger heads, whose values may be their keys. The last
layers may attend to the caches of earlier ones. Small models give each layer an
embedding of its own of every token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import rounded, wrap
from inl.models import blocks, gemma, groups, mlp, moe, post_norm
from inl.models.gemma4_config import Gemma4Config, config
from inl.models.views import View
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.moe import Experts
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
from inl.spec.cache import Paged, State
from inl.spec.model import Model, ModelInputs
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class Attention(NamedTuple):
    """Weights of :func:`attention`: groups, replaced by tensors when loaded."""

    qkv: Any
    """Queries alone for a layer that attends to the cache of another."""
    out: Linear | Group
    post: Norm | Group
    norm: Norm | Group
    q_norm: Norm | Group
    k_norm: Any
    """``None`` for such a layer, as ``v_norm``."""
    v_norm: Any


class Mixture(NamedTuple):
    """Weights of experts beside a dense feed-forward layer."""

    router_norm: Norm | Group
    router: Linear | Group
    scales: Any
    """[E]: factors on the routing weights of experts."""
    experts: Experts | Group
    dense_post: Norm | Group
    """Applied to the output of the dense layer."""
    norm: Norm | Group
    """Applied to the input of the experts."""
    post: Norm | Group
    """Applied to their output."""


class LayerInput(NamedTuple):
    """Weights of :func:`add_input`: groups, replaced by tensors when loaded."""

    gate: Linear | Group
    """[P, H]."""
    out: Linear | Group
    """[H, P]."""
    post: Norm | Group


class Layer(NamedTuple):
    """Parameters of one decoder layer."""

    attention: Attention
    mlp: post_norm.Mlp
    scale: Any
    """[1]: factor on the layer's output."""
    mixture: Mixture | None
    input: LayerInput | None


class Inputs(NamedTuple):
    """Weights of the embeddings that layers have of their own."""

    table: Embedding | Group
    """[V, L * P]."""
    projection: Linear | Group
    """[L * P, H]: of the embedding that all layers share."""
    norm: Norm | Group
    """[P]."""


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Embedding | Group
    inputs: Inputs | None
    layers: tuple[Layer, ...]
    norm: Norm | Group
    head: Linear | Group


class InputCarry(NamedTuple):
    """Activations of a model whose layers have embeddings of their own."""

    residual: Array
    delta: Array
    cos: Array
    sin: Array
    local_cos: Array
    local_sin: Array
    inputs: Array
    """[T, L, P]."""

    def tables(self, view: View) -> tuple[Array, Array]:
        """Return the rotation tables of a layer."""
        return blocks.local_tables(self, view)


def heads_of(c: Gemma4Config, view: View) -> Gemma4Config:
    """Return a config with the heads of a layer, whose lanes are in stored order."""
    # Planes that turn come first in each half of a head, as ``rope`` has them.
    c = replace(c, rope_scaling=RopeScaling())
    if view.window is not None:
        return c
    return replace(c, head_dim=c.full_head_dim, kv_heads=c.full_kv_heads)


def weights(c: Gemma4Config) -> Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    wide, inputs = c.layers * c.input_size, None
    if c.input_size:
        table = Param("model.embed_tokens_per_layer.weight", (c.input_vocab, wide))
        inputs = Inputs(
            Group("embedding", weight=table),
            groups.linear("model.per_layer_model_projection", wide, c.hidden_size),
            groups.norm("model.per_layer_projection_norm", c.input_size),
        )
    return Weights(
        groups.table(c),
        inputs,
        tuple(_layer(c, index) for index in range(c.layers)),
        groups.norm("model.norm", c.hidden_size),
        groups.head(c),
    )


def _layer(c: Gemma4Config, index: int) -> Layer:
    at, is_own = f"model.layers.{index}.", c.sources[index] == index

    def norm(name: str, size: int = c.hidden_size) -> Group:
        return groups.norm(f"{at}{name}", size)

    size = c.intermediate_size if is_own else c.shared_size
    feed_forward = mlp.weights(replace(c, intermediate_size=size), f"{at}mlp")
    return Layer(
        attention_weights(c, index, norm),
        post_norm.Mlp(
            feed_forward,
            norm("post_feedforward_layernorm"),
            norm("pre_feedforward_layernorm"),
        ),
        Group("rms_norm", weight=Param(f"{at}layer_scalar", (1,), finite=True)),
        _mixture(c, at, norm) if c.experts else None,
        LayerInput(
            groups.linear(f"{at}per_layer_input_gate", c.input_size, c.hidden_size),
            groups.linear(f"{at}per_layer_projection", c.hidden_size, c.input_size),
            norm("post_per_layer_input_norm"),
        )
        if c.input_size
        else None,
    )


def attention_weights(c: Gemma4Config, index: int, norm: Any) -> Attention:
    at, view = f"model.layers.{index}.", c.views[index]
    shaped = heads_of(c, view)
    shared = (
        groups.out(shaped, at),
        norm("post_attention_layernorm"),
        norm("input_layernorm"),
        norm("self_attn.q_norm", shaped.head_dim),
    )
    if c.sources[index] != index:
        lanes = shaped.heads * shaped.head_dim
        queries = groups.linear(f"{at}self_attn.q_proj", lanes, c.hidden_size, axis=0)
        return Attention(queries, *shared, None, None)
    qkv = groups.qkv(shaped, at)
    if c.one_projection and view.window is None:
        qkv = Group("qkv_linear", **{**qkv.params, "v": qkv.params["k"]})
    inner = (norm(f"self_attn.{name}_norm", shaped.head_dim) for name in "kv")
    return Attention(qkv, *shared, *inner)


def _mixture(c: Any, at: str, norm: Any) -> Mixture:
    scales = Param(f"{at}router.per_expert_scale", (c.experts,), wide=True)
    return Mixture(
        Group("rms_norm", weight=Param(f"{at}router.scale", (c.hidden_size,))),
        moe.router(c, f"{at}router.proj.weight"),
        Group("rms_norm", weight=scales),
        moe.expert_group(
            c, f"{at}experts", f"{at}experts",
            gate="gate_proj", up="up_proj", down="down_proj",
        ),
        norm("post_feedforward_layernorm_1"),
        norm("pre_feedforward_layernorm_2"),
        norm("post_feedforward_layernorm_2"),
    )  # fmt: skip


def state(c: Gemma4Config) -> tuple[Paged, ...]:
    """Return the cache groups of the layers that have caches."""
    found = []
    for view in sorted({*c.views}, key=lambda view: view.group):
        shaped = heads_of(c, view)
        layers = tuple(
            index
            for index, other in enumerate(c.views)
            if other == view and c.sources[index] == index
        )
        group = Paged(layers, shaped.kv_heads, shaped.head_dim, c.dtype, view.window)
        found.append(group)
    return tuple(found)


def embed(ops: Ops, c: Gemma4Config, w: Any, step: Step) -> Any:
    """Look up the embeddings, compute both rotations and the inputs of layers."""
    residual = ops.embedding(step.tokens, w.embed) * _stored(c, c.embed_scale)
    full = blocks.rotation(ops, c.full_head_dim, step, c.rope_theta, c.rope_scaling)
    assert c.local_rope is not None, "read by config"
    local = blocks.rotation(ops, c.head_dim, step, *c.local_rope)
    carry = blocks.LocalCarry(residual, ops.zeros_like(residual), *full, *local)
    if w.inputs is None:
        return carry
    shape = residual.shape[0], c.layers, c.input_size
    own = ops.embedding(step.tokens, w.inputs.table) * _stored(c, c.input_size**0.5)
    projected = ops.linear(residual, w.inputs.projection) * c.hidden_size**-0.5
    projected = ops.rms_norm(projected.reshape(*shape), w.inputs.norm, eps=c.norm_eps)
    return InputCarry(*carry, (projected + own.reshape(*shape)) * 2**-0.5)


def _stored(c: Gemma4Config, factor: float) -> float:
    """Return a factor as transformers rounds it: to the storage dtype."""
    return float(rounded(np.array(factor, np.float32), c.dtype))


def layer(
    ops: Ops, c: Gemma4Config, w: Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    if w.mixture is None:
        carry = post_norm.gated_mlp(ops, c, w.mlp, carry)
    else:
        carry = with_experts(ops, c, w.mlp, w.mixture, carry)
    if w.input is not None:
        given = carry.inputs[:, index : index + 1]
        given = given.reshape(given.shape[0], c.input_size)
        if sampled_step is not None:
            given = ops.take_rows(given, step.samples)
        carry = add_input(ops, c, w.input, given, carry)
    scale = w.scale.weight
    return (
        carry._replace(residual=carry.residual * scale, delta=carry.delta * scale),
        state,
    )


def attention(
    ops: Ops, c: Gemma4Config, w: Attention, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None,
) -> tuple[Any, State]:  # fmt: skip
    """Attention block over the layer's own cache or that of an earlier layer."""
    view, source = c.views[index], c.sources[index]
    split = partial(blocks.split_heads, dim=heads_of(c, view).head_dim)
    norm = partial(ops.rms_norm, eps=c.norm_eps)
    residual, x = post_norm.enter(ops, c, carry, w.norm)
    if source == index:
        q, k, v = split(ops.qkv_linear(x, w.qkv))
        q, k, v = norm(q, w.q_norm), norm(k, w.k_norm), norm(v, w.v_norm)
        q, k = ops.rope(q, k, *carry.tables(view))
        out, state = blocks.attend(
            ops, q, k, v, step, state,
            index=index, view=view, scale=1.0, sampled_step=sampled_step,
        )  # fmt: skip
    else:
        (q,) = split((ops.linear(x, w.qkv),))
        q = norm(q, w.q_norm)
        q, _ = ops.rope(q, q[:, :1], *carry.tables(view))
        if sampled_step is not None:
            q = ops.take_rows(q, step.samples)
        out = ops.attention(
            q, state.caches[source], sampled_step or step,
            scale=1.0, window=view.window, cap=None, group=view.group,
        )  # fmt: skip
        out = out.reshape(out.shape[0], -1)
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    delta = post_norm.leave(ops, c, ops.linear(out, w.out), w.post)
    return carry._replace(residual=residual, delta=delta), state


def with_experts(
    ops: Ops, c: Gemma4Config, dense: post_norm.Mlp, w: Mixture, carry: Any
) -> Any:
    """Dense feed-forward block, with experts of the same residual beside it."""
    residual, x = post_norm.enter(ops, c, carry, dense.norm)
    delta = mlp.feed_forward(ops, x, dense.mlp, c.activation)
    delta = post_norm.leave(ops, c, delta, w.dense_post)
    routed = ops.rms_norm(residual, w.router_norm, eps=c.norm_eps)
    logits = ops.linear(routed * c.hidden_size**-0.5, w.router)
    ids, shares = ops.route(
        logits, k=c.experts_per_token, renormalize=True, kind="softmax_topk"
    )
    factors = ops.take_rows(w.scales.weight.reshape(-1, 1), ids.reshape(-1))
    shares = shares * factors.reshape(*shares.shape)
    x = ops.rms_norm(residual, w.norm, eps=c.norm_eps)
    mixed = ops.experts(x, ids, shares, w.experts, activation=c.activation)
    delta = delta + post_norm.leave(ops, c, mixed, w.post)
    assert dense.post is not None, "all blocks of Gemma 4 have norms after them"
    delta = ops.rms_norm(delta, dense.post, eps=c.norm_eps)
    return carry._replace(residual=residual, delta=delta)


def add_input(
    ops: Ops, c: Gemma4Config, w: LayerInput, given: Array, carry: Any
) -> Any:
    """Block that lets the embedding [T, P] of a layer through a gate."""
    residual = carry.residual + carry.delta
    gate = ops.linear(residual, w.gate)
    inner = ops.gated_activation(gate, given, activation=c.activation)
    delta = ops.rms_norm(ops.linear(inner, w.out), w.post, eps=c.norm_eps)
    return carry._replace(residual=residual, delta=delta)


def adapt(
    c: Gemma4Config, checkpoint: Checkpoint
) -> tuple[Gemma4Config, AdaptedCheckpoint]:
    """Add the weights of the norms of values, which are ones.

    Tensors of keys and values of layers without a cache of their own are not used.
    """
    names, pieces = set(checkpoint.names()), {}
    unused = tuple(
        f"model.layers.{index}.self_attn.{name}"
        for index, source in enumerate(c.sources)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
        if source != index
    )
    for name in checkpoint.names():
        if not name.startswith(unused):
            pieces[name] = Piece((name,), checkpoint.spec(name)[1])
    for index, source in enumerate(c.sources):
        stem = f"model.layers.{index}.self_attn."
        name, like = f"{stem}v_norm.weight", f"{stem}k_norm.weight"
        if source == index and name not in names and like in names:
            ones = wrap(np.ones(heads_of(c, c.views[index]).head_dim, np.float32))
            pieces[name] = Piece((like,), ones.shape, partial(_constant, ones))
    return c, AdaptedCheckpoint(checkpoint, pieces)


def _constant(value: Any, _stored: Any) -> Any:
    return value


def inputs(c: Gemma4Config) -> ModelInputs:
    """Return how tokens of an image attend, and which embedding layers have of them."""
    pad = c.pad if c.input_size else None
    return ModelInputs(spans=c.spans, windowed_spans=c.spans, embedded_id=pad)


MODEL = Model(
    config, weights, state, embed, layer, gemma.head, adapt=adapt, inputs=inputs
)
