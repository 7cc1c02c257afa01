"""Gemma 3n, text (Gemma team, 2025): several residuals, of which one is computed.

A layer predicts all residuals from those before it (alternating updates, Baykal et al.,
2023), computes its blocks on one and corrects the others by what that one has changed.
Beside attention is a product of two small matrices. Feed-forward layers may keep the
largest of their gates only, by mean and deviation. As in Gemma 4, layers have
embeddings of their own, and the last ones attend to the caches of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.dtypes import HostArray, wrap
from inl.errors import CheckpointError, WeightMismatch
from inl.models import blocks, gemma, gemma4, groups, llama, post_norm
from inl.models.config import cap, flag, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.gemma4_config import Gemma4Config, sources_of
from inl.models.rope import local_ropes
from inl.models.views import View, one_full_in, views, windows
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.model import Model
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

THETA, LOCAL_THETA = 1e6, 1e4
PATTERN: Final = 5
"""Default period of layers without a window."""
DEFAULTS: Final = {
    **gemma.DEFAULTS, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "sliding_window": 512, "final_logit_softcapping": 30.0,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
SPARSE: Final = 10, 0.95
"""Default number of first layers that keep the largest gates, of more than as many, and
the share of gates that they leave out."""
TINY: Final = 1e-30
"""Epsilon of norms that measure a length, which may not be 0."""
ONES, MEAN = "model.lengths.norm.weight", "model.lengths.mean.weight"
"""Names of the constants of :class:`Length`, which no file has."""


@dataclass(frozen=True, slots=True)
class Gemma3nConfig(Gemma4Config):
    """Sizes and constants of one checkpoint."""

    streams: int = 4
    """A: residuals."""
    active: int = 0
    """The one that blocks are computed on."""
    scaled: bool = True
    """Whether what the embeddings of layers are let through by has factors."""
    rank: int = 64
    """Inner size of the product beside attention."""
    sizes: tuple[int, ...] = ()
    """Inner sizes of the feed-forward layers."""
    left_out: tuple[float, ...] = ()
    """Share of the gates of each layer that are left out; 0 for none."""


class Length(NamedTuple):
    """Constants by which the root of a mean of squares is computed."""

    norm: Norm | Group
    """Ones."""
    router: Linear | Group
    """[1, N]: 1 / N. By its name, it is never quantized."""


class Updates(NamedTuple):
    """Weights of alternating updates: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    router: Linear | Group
    """[A, H]."""
    prediction: Linear | Group
    """[A * A, A]."""
    correction: Linear | Group
    """[A, A]."""
    scale: Any
    """[H]."""


class Product(NamedTuple):
    """Weights of the product beside attention."""

    left: Linear | Group
    right: Linear | Group
    post: Norm | Group


class FeedForward(NamedTuple):
    """Weights of a feed-forward layer that leaves out most gates."""

    gate: Linear | Group
    up: Linear | Group
    down: Linear | Group
    length: Length


class Layer(NamedTuple):
    """Parameters of one decoder layer."""

    attention: gemma4.Attention
    updates: Updates
    product: Product
    norm: Norm | Group
    """Applied to the input of the feed-forward layer."""
    mlp: GatedMlp | FeedForward | Group
    post: Norm | Group
    """Applied to its output."""
    input: gemma4.LayerInput


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Embedding | Group
    inputs: gemma4.Inputs
    length: Length
    enter: tuple[Linear | Group, ...]
    """[H, H]: from the embedding to each residual but the first."""
    leave: tuple[Linear | Group, ...]
    """[H, H]: of each residual but the first."""
    layers: tuple[Layer, ...]
    norm: Norm | Group
    head: Linear | Group


class StreamCarry(NamedTuple):
    """Activations passed from layer to layer."""

    residual: Array
    """[T, H]: the residual that is computed on."""
    delta: Array
    cos: Array
    sin: Array
    local_cos: Array
    local_sin: Array
    inputs: Array
    """[T, L, P]."""
    streams: tuple[Array, ...]
    """[T, H] each."""

    def tables(self, view: View) -> tuple[Array, Array]:
        """Return the rotation tables of a layer."""
        return blocks.local_tables(self, view)


def config(hf: Mapping[str, Any]) -> Gemma3nConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    for name, accepted in (("attention_bias", False), ("mlp_bias", False),
                           ("hidden_activation", gemma.GELU)):  # fmt: skip
        refuse_unless(hf, name, accepted)
    layers = whole(hf, "num_hidden_layers")
    sizes = _of_layers(hf, "intermediate_size", layers, int)
    full, local = local_ropes(hf, THETA, LOCAL_THETA, "rope_local_base_freq")
    given = changed(hf, hidden_act=gemma.GELU, intermediate_size=max(sizes))
    base = llama.with_rope(given, full)
    found = windows(hf, one_full_in(layers, period=PATTERN))
    hf.get("altup_coef_clip")  # of weights in training
    streams = whole(hf, "altup_num_inputs", 4)
    count, share = SPARSE
    usual = [share if index < count < layers else 0.0 for index in range(layers)]
    if hf.get("activation_sparsity_pattern") is None:
        hf = changed(hf, activation_sparsity_pattern=usual)
    return llama.extended(
        Gemma3nConfig,
        base,
        views=views(found),
        attention_scale=1.0,
        logit_cap=cap(hf, "final_logit_softcapping", None),
        embed_scale=base.hidden_size**0.5,
        norm_offset=0.0,
        local_rope=local[:2],
        full_head_dim=base.head_dim,
        full_kv_heads=base.kv_heads,
        sources=sources_of(hf, found),
        input_size=whole(hf, "hidden_size_per_layer_input", 256),
        input_vocab=whole(hf, "vocab_size_per_layer_input", 262144),
        streams=streams,
        active=whole(hf, "altup_active_idx", 0, least=0, most=streams - 1),
        scaled=flag(hf, "altup_correct_scale", True),
        rank=whole(hf, "laurel_rank", 64),
        sizes=sizes,
        left_out=_of_layers(hf, "activation_sparsity_pattern", layers, float),
    )


def _of_layers(hf: Mapping[str, Any], name: str, layers: int, kind: type) -> Any:
    """Return a field with a value for each layer, or one size for all."""
    value = hf.get(name)
    if kind is int and not isinstance(value, (list, tuple)):
        return (whole(hf, name),) * layers
    accepted = isinstance(value, (list, tuple)) and len(value) == layers
    if kind is int:
        accepted = accepted and all(type(one) is int and one > 0 for one in value or ())
    else:
        accepted = accepted and all(
            type(one) in (int, float) and 0 <= one < 1 for one in value or ()
        )
    if not accepted:
        expected = "sizes" if kind is int else "shares of 0 or more, below 1"
        raise CheckpointError(
            f"config field {name!r}: found {show(value)}, expected {layers} {expected}"
        )
    return tuple(value or ())


def weights(c: Gemma3nConfig) -> Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    # The layers of a tree of Gemma 4 are not used: they are those of another model.
    given = gemma4.weights(replace(c, layers=0))
    wide, h = c.layers * c.input_size, c.hidden_size
    rows = max(c.input_vocab, c.vocab_size)
    table = Param("model.embed_tokens_per_layer.weight", (rows, wide))
    inputs = gemma4.Inputs(
        Group("embedding", weight=table),
        groups.linear("model.per_layer_model_projection", wide, h),
        groups.norm("model.per_layer_projection_norm", c.input_size),
    )
    enter, leave = (
        tuple(
            groups.linear(f"model.altup_{name}.{index}", h, h)
            for index in range(c.streams - 1)
        )
        for name in ("projections", "unembed_projections")
    )
    return Weights(
        given.embed, inputs, _length(h), enter, leave,
        tuple(_layer(c, index) for index in range(c.layers)), given.norm, given.head,
    )  # fmt: skip


def _length(size: int) -> Length:
    mean = Param(f"{MEAN}.{size}", (1, size))
    ones = Param(f"{ONES}.{size}", (size,))
    return Length(Group("rms_norm", weight=ones), Group("linear", weight=mean))


def _layer(c: Gemma3nConfig, index: int) -> Layer:
    at, h, a = f"model.layers.{index}.", c.hidden_size, c.streams
    size = c.sizes[index]

    def norm(name: str, size: int = h) -> Group:
        return groups.norm(f"{at}{name}", size)

    def linear(name: str, rows: int, columns: int) -> Group:
        return groups.linear(f"{at}{name}", rows, columns)

    inner: FeedForward | Group = groups.gated(f"{at}mlp", h, size)
    if c.left_out[index]:
        inner = FeedForward(
            groups.linear(f"{at}mlp.gate_proj", size, h, axis=0),
            groups.linear(f"{at}mlp.up_proj", size, h, axis=0),
            groups.linear(f"{at}mlp.down_proj", h, size, axis=1),
            _length(size),
        )
    scale = Param(f"{at}altup.correct_output_scale", (h,))
    return Layer(
        gemma4.attention_weights(c, index, norm),
        Updates(
            norm("altup.router_norm"),
            linear("altup.modality_router", a, h),
            linear("altup.prediction_coefs", a * a, a),
            linear("altup.correction_coefs", a, a),
            Group("rms_norm", weight=scale),
        ),
        Product(
            linear("laurel.linear_left", c.rank, h),
            linear("laurel.linear_right", h, c.rank),
            norm("laurel.post_laurel_norm"),
        ),
        norm("pre_feedforward_layernorm"),
        inner,
        norm("post_feedforward_layernorm"),
        gemma4.LayerInput(
            linear("per_layer_input_gate", c.input_size, h),
            linear("per_layer_projection", h, c.input_size),
            norm("post_per_layer_input_norm"),
        ),
    )


def length(ops: Ops, w: Length, x: Array) -> Array:
    """Return the root of the mean of squares of each row of ``x`` [T, N]: [T, 1]."""
    return ops.linear(x * ops.rms_norm(x, w.norm, eps=TINY), w.router)


def resized(ops: Ops, w: Length, x: Array, size: Array) -> Array:
    """Return rows of ``x`` [T, H] with the lengths ``size`` [T, 1].

    transformers divides by 0.003 at least, which lengths of residuals are above.
    """
    return ops.rms_norm(x, w.norm, eps=TINY) * size


def embed(ops: Ops, c: Gemma3nConfig, w: Weights, step: Step) -> StreamCarry:
    """Look up the embeddings, and compute all residuals and the inputs of layers."""
    carry = gemma4.embed(ops, c, w, step)
    first = carry.residual
    size = length(ops, w.length, first)
    others = (
        resized(ops, w.length, ops.linear(first, matrix), size) for matrix in w.enter
    )
    return _carried(ops, c, StreamCarry(**carry._asdict(), streams=(first, *others)))


def _carried(ops: Ops, c: Gemma3nConfig, carry: StreamCarry) -> StreamCarry:
    own = carry.streams[c.active]
    return carry._replace(residual=own, delta=ops.zeros_like(own))


def _kinds(ops: Ops, c: Gemma3nConfig, w: Updates, x: Array) -> Array:
    """Return what predictions and corrections of a token depend on, [T, A]."""
    x = ops.rms_norm(x, w.norm, eps=c.norm_eps) * (1 / c.hidden_size)
    return ops.activate(ops.linear(x, w.router), kind="tanh")


def predicted(
    ops: Ops, c: Gemma3nConfig, w: Updates, streams: Sequence[Array]
) -> list[Array]:
    """Return all residuals as predicted from those before the layer."""
    factors = ops.linear(_kinds(ops, c, w, streams[c.active]), w.prediction)
    found = []
    for index, total in enumerate(streams):
        for other, stream in enumerate(streams):
            at = index * c.streams + other
            total = total + stream * factors[:, at : at + 1]
        found.append(total)
    return found


def corrected(
    ops: Ops, c: Gemma3nConfig, w: Updates, streams: Sequence[Array], own: Array
) -> list[Array]:
    """Return all residuals, by how ``own`` differs from its prediction."""
    factors = ops.linear(_kinds(ops, c, w, own), w.correction) + 1.0
    new = own - streams[c.active]
    return [
        stream + new * factors[:, index : index + 1]
        for index, stream in enumerate(streams)
    ]


def layer(
    ops: Ops, c: Gemma3nConfig, w: Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[StreamCarry, State]:  # fmt: skip
    streams = predicted(ops, c, w.updates, carry.streams)
    given = carry.inputs[:, index]
    carry, state = gemma4.attention(
        ops, c, w.attention, carry._replace(residual=streams[c.active]), step, state,
        index=index, sampled_step=sampled_step,
    )  # fmt: skip
    if sampled_step is not None:
        streams = [ops.take_rows(stream, step.samples) for stream in streams]
        given = ops.take_rows(given, step.samples)
    norm = partial(ops.rms_norm, eps=c.norm_eps)
    x = norm(carry.residual, w.attention.norm)
    product = ops.linear(ops.linear(x, w.product.left), w.product.right)
    x = x + norm(product, w.product.post)
    own = (carry.residual + carry.delta + x) * 2**-0.5
    inner = feed_forward(ops, c, w.mlp, norm(own, w.norm), index)
    own = own + post_norm.leave(ops, c, inner, w.post)
    streams = corrected(ops, c, w.updates, streams, own)
    own = streams[c.active]
    if c.scaled:
        own = own * w.updates.scale.weight
    gate = ops.linear(own, w.input.gate)
    inner = ops.gated_activation(gate, given, activation=c.activation)
    added = norm(ops.linear(inner, w.input.out), w.input.post)
    first, *others = streams
    carry = carry._replace(streams=(first, *(other + added for other in others)))
    return _carried(ops, c, carry), state


def feed_forward(
    ops: Ops, c: Gemma3nConfig, w: GatedMlp | FeedForward | Group, x: Array, index: int
) -> Array:
    """Return the feed-forward layer's partial sum, [T, H].

    Gates that are not above their mean by a number of standard deviations are left out.
    """
    if not isinstance(w, FeedForward):
        return ops.gated_mlp(x, w, activation=c.activation)
    gate = ops.linear(x, w.gate)
    if gate.shape[-1] != c.sizes[index]:
        raise WeightMismatch(
            f"gates of layer {index}: found {gate.shape[-1]} of {c.sizes[index]} on a "
            "rank; the model compares all with their mean, accepted: 1 rank"
        )
    gate = gate - ops.linear(gate, w.length.router)
    size = length(ops, w.length, gate)
    gate = gate - size * NormalDist().inv_cdf(c.left_out[index])
    inner = ops.gated_activation(
        ops.activate(gate, kind="relu"), ops.linear(x, w.up), activation=c.activation
    )
    return ops.linear(inner, w.down)


def head(ops: Ops, c: Gemma3nConfig, w: Weights, carry: Any, step: Step) -> Array:
    """Logits [S, V] of the sampled tokens, by the mean of all residuals."""
    first, *others = (ops.take_rows(each, step.samples) for each in carry.streams)
    size, total = length(ops, w.length, first), first
    for other, matrix in zip(others, w.leave, strict=True):
        total = total + resized(ops, w.length, ops.linear(other, matrix), size)
    x = ops.rms_norm(total * (1 / c.streams), w.norm, eps=c.norm_eps)
    logits = ops.linear(x, w.head)
    if c.logit_cap is not None:
        logits = ops.soft_cap(logits, cap=c.logit_cap)
    return ops.all_gather(logits, axis="tensor")


def adapt(
    c: Gemma3nConfig, checkpoint: Checkpoint
) -> tuple[Gemma3nConfig, AdaptedCheckpoint]:
    """Add constants, and rows of tokens for which layers have the first embedding."""
    _, given = gemma4.adapt(c, checkpoint)
    names = given.names()
    pieces = {name: Piece((name,), given.spec(name)[1]) for name in names}
    table = "model.embed_tokens_per_layer.weight"
    missing = c.vocab_size - c.input_vocab
    if missing > 0 and table in names:
        rows, *rest = given.spec(table)[1]
        shape = (rows + missing, *rest)
        pieces[table] = Piece((table,), shape, partial(_filled, missing))
    source = "model.norm.weight"
    compared = (size for size, share in zip(c.sizes, c.left_out, strict=True) if share)
    for size in {c.hidden_size, *compared}:
        ones = np.ones(size, np.float32)
        for name, value in ((ONES, ones), (MEAN, ones[None] / size)):
            array = wrap(value)
            make = partial(_constant, array)
            pieces[f"{name}.{size}"] = Piece((source,), array.shape, make)
    return c, AdaptedCheckpoint(given, pieces)


def _constant(value: HostArray, _stored: Any) -> HostArray:
    return value


def _filled(count: int, stored: Sequence[HostArray]) -> HostArray:
    """Return a table with ``count`` more rows, which are the first one."""
    (table,) = stored
    data = np.concatenate([table.data, np.repeat(table.data[:1], count, 0)])
    return HostArray(data, table.dtype, (table.shape[0] + count, *table.shape[1:]))


MODEL = Model(config, weights, gemma4.state, embed, layer, head, adapt=adapt)
