"""Llama family (Touvron et al., 2023): Llama 1 to 3, SmolLM2 and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from inl.errors import CheckpointError
from inl.models import blocks, groups, mlp
from inl.models.config import (
    MAX_EPS,
    flag,
    number,
    one_of,
    whole,
)
from inl.models.rope import AXES, THETA, Rope, read_rope, rotating_lanes, scaled_rope
from inl.models.views import View, paged, views
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.rope import RopeScaling
from inl.spec.cache import Paged
from inl.spec.model import COMPUTATIONS, Model, ModelInputs
from inl.spec.step import Array, Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes and constants of one checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    activation: str
    tied: bool
    qkv_bias: bool
    dtype: str = "float32"
    """Compute dtype; the loader sets it."""
    views: tuple[View, ...] = ()
    """Attention window and cache group of each layer."""
    head_norm: bool = False
    """Whether each head of queries and keys is normalized."""
    out_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the projections of the feed-forward layer have biases."""
    longer: tuple[int, RopeScaling] | None = None
    """A context above ``max_tokens``, and the rotation of all of its tokens."""
    attention_scale: float | None = None
    """Factor on attention scores; ``None`` is ``head_dim ** -0.5``."""
    feature_layers: tuple[int, ...] = ()
    """Layers after which features of images are added (Meng et al., 2024)."""


Derived = TypeVar("Derived", bound=LlamaConfig)


class Layer(NamedTuple):
    """Parameters of one decoder layer; derived models have other types of both."""

    attention: Any
    mlp: Any


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Embedding | Group
    layers: tuple[Layer, ...]
    norm: Norm | Group
    head: Linear | Group


def config(hf: Mapping[str, Any], *, theta: float = THETA) -> LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field.

    theta: default base frequency of the rotation.
    """
    return with_rope(hf, read_rope(hf, theta=theta))


def with_rope(hf: Mapping[str, Any], rope: Rope) -> LlamaConfig:
    """Read all but the rotation; raises :class:`CheckpointError` naming the field."""
    hidden, heads = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    grouped = hf.get("num_key_value_heads") is not None
    kv_heads = whole(hf, "num_key_value_heads") if grouped else heads
    if heads % kv_heads:
        raise CheckpointError(
            f"config field 'num_key_value_heads': found {kv_heads}, "
            f"expected a divisor of num_attention_heads, {heads}"
        )
    if hf.get("head_dim") is None and hidden % heads:
        raise CheckpointError(
            f"config field 'num_attention_heads': found {heads}, "
            f"expected a divisor of hidden_size, {hidden}"
        )
    head_dim = whole(hf, "head_dim", hidden // heads) if hf.get("head_dim") else 0
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise CheckpointError(
            f"config field 'head_dim': found {head_dim}, accepted: even"
        )
    axes = rope.scaling.axes
    if axes and len(axes) != (rope.scaling.rotary_dim or head_dim) // 2:
        raise CheckpointError(
            f"config field 'rope_scaling.mrope_section': found {len(axes)} planes, "
            f"expected those of a head of {head_dim} lanes"
        )
    bias = flag(hf, "attention_bias", False)
    layers = whole(hf, "num_hidden_layers")
    return LlamaConfig(
        vocab_size=whole(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_tokens=rope.max_tokens,
        norm_eps=number(hf, "rms_norm_eps", 1e-6, most=MAX_EPS),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        activation=one_of(hf, "hidden_act", mlp.ACTIVATIONS),
        tied=flag(hf, "tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=flag(hf, "mlp_bias", False),
        views=views((None,) * layers),
        feature_layers=tuple(range(len(hf.get("deepstack_visual_indexes") or ()))),
    )


def partly_rotated(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> LlamaConfig:
    """Read a config whose heads rotate in part; raises :class:`CheckpointError`.

    rope: the fields of :func:`~inl.models.rope.rope_fields`.
    """
    base = with_rope(hf, scaled_rope(rope, hf))
    share = number(rope, "partial_rotary_factor", 1.0)
    lanes = rotating_lanes(share, base.head_dim)
    return replace(base, rope_scaling=base.rope_scaling._replace(rotary_dim=lanes))


def extended(kind: type[Derived], base: LlamaConfig, **given: Any) -> Derived:
    """Return a config of a derived type with the fields of ``base`` and others."""
    known = {field.name: getattr(base, field.name) for field in fields(base)}
    return kind(**known | given)


def weights(c: LlamaConfig) -> Weights:
    """Return the weight tree, by Hugging Face tensor names."""
    return Weights(
        embed=groups.table(c),
        layers=tuple(layer_weights(c, f"model.layers.{i}.") for i in range(c.layers)),
        norm=groups.norm("model.norm", c.hidden_size),
        head=groups.head(c),
    )


def layer_weights(c: LlamaConfig, at: str) -> Layer:
    """Return the groups of the layer with name prefix ``at``."""
    norms = {
        f"{name}_norm": groups.rotated_norm(f"{at}self_attn.{name}_norm", c)
        for name in ("qk" if c.head_norm else "")
    }
    return Layer(
        blocks.Attention(
            groups.norm(f"{at}input_layernorm", c.hidden_size),
            groups.qkv(c, at, bias=c.qkv_bias),
            groups.out(c, at, bias=c.out_bias),
            **norms,
        ),
        blocks.Mlp(
            groups.norm(f"{at}post_attention_layernorm", c.hidden_size),
            mlp.weights(c, f"{at}mlp"),
        ),
    )


def with_layers(tree: Weights, change: Callable[[str, Layer], Layer]) -> Weights:
    """Return a tree with ``change(name prefix, layer)`` in place of each layer."""
    layers = (
        change(f"model.layers.{index}.", layer)
        for index, layer in enumerate(tree.layers)
    )
    return tree._replace(layers=tuple(layers))


def state(c: LlamaConfig) -> tuple[Paged, ...]:
    """Return one cache group per distinct window."""
    return paged(c)


def embed(ops: Ops, c: LlamaConfig, w: Weights, step: Step) -> blocks.Carry:
    return blocks.embed(ops, c, w.embed, step)


layer = partial(blocks.layer, blocks.gated_mlp)


def head(ops: Ops, c: LlamaConfig, w: Weights, carry: Any, step: Step) -> Array:
    return blocks.head(ops, c, w.norm, w.head, carry, step)


def inputs(c: LlamaConfig) -> ModelInputs:
    """Return the axes of positions, and the layers that add features."""
    axes = AXES if c.rope_scaling.axes else 0
    return ModelInputs(axes=axes, feature_layers=c.feature_layers)


MODEL = Model(config, weights, state, embed, layer, head, inputs=inputs)
COMPUTATIONS[embed, layer, head] = "llama"
