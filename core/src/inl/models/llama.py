"""The Llama family (Touvron et al., 2023): Llama 1 to 3, SmolLM2 and their kin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inl.errors import CheckpointError
from inl.models import blocks
from inl.models.config import flag, number, one_of, rope_scaling, whole
from inl.ops.rope import RopeScaling
from inl.spec.values import Array, Group, Model, Paged, Param, State, Step

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


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


class Layer(NamedTuple):
    """Parameters of one decoder layer."""

    attention: Any
    mlp: Any


class Weights(NamedTuple):
    """Parameters of the whole model."""

    embed: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Any


def config(hf: Mapping[str, Any]) -> LlamaConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hidden, heads = whole(hf, "hidden_size"), whole(hf, "num_attention_heads")
    kv_heads = whole(hf, "num_key_value_heads", heads)
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
        raise CheckpointError(f"config field 'head_dim': found {head_dim}, not even")
    if number(hf, "partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            "config field 'partial_rotary_factor': "
            f"found {hf['partial_rotary_factor']!r}, accepted: 1.0"
        )
    if flag(hf, "mlp_bias", False):
        raise CheckpointError("config field 'mlp_bias': found true, accepted: false")
    theta, scaling = rope_scaling(hf)
    return LlamaConfig(
        vocab_size=whole(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(hf, "intermediate_size"),
        layers=whole(hf, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_tokens=whole(hf, "max_position_embeddings", 2048),
        norm_eps=number(hf, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        activation=one_of(hf, "hidden_act", ACTIVATIONS),
        tied=flag(hf, "tie_word_embeddings", False),
        qkv_bias=flag(hf, "attention_bias", False),
    )


def weights(c: LlamaConfig) -> Weights:
    """What to load, under its Hugging Face names; no bytes are read."""
    table = Param("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
    head = table if c.tied else table._replace(source="lm_head.weight")
    return Weights(
        embed=Group("embedding", weight=table),
        layers=tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers)),
        norm=_norm(c, "model.norm"),
        head=Group("linear", weight=head._replace(axis=0)),
    )


def _layer(c: LlamaConfig, at: str) -> Layer:
    h, inner = c.hidden_size, c.intermediate_size
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    qkv: dict[str, Param] = {}
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        source = f"{at}self_attn.{name}_proj"
        qkv[name] = Param(f"{source}.weight", (rows, h), axis=0)
        if c.qkv_bias:
            qkv[f"{name}_bias"] = Param(f"{source}.bias", (rows,), axis=0)
    out = Param(f"{at}self_attn.o_proj.weight", (h, queries), axis=1)
    mlp = Group(
        "gated_mlp",
        gate=Param(f"{at}mlp.gate_proj.weight", (inner, h), axis=0),
        up=Param(f"{at}mlp.up_proj.weight", (inner, h), axis=0),
        down=Param(f"{at}mlp.down_proj.weight", (h, inner), axis=1),
    )
    return Layer(
        blocks.Attention(
            _norm(c, f"{at}input_layernorm"),
            Group("qkv_linear", **qkv),
            Group("linear", weight=out),
        ),
        blocks.Mlp(_norm(c, f"{at}post_attention_layernorm"), mlp),
    )


def _norm(c: LlamaConfig, name: str) -> Group:
    return Group("rms_norm", weight=Param(f"{name}.weight", (c.hidden_size,)))


def state(c: LlamaConfig) -> tuple[Paged, ...]:
    """One cache group: every layer sees everything."""
    return (Paged(tuple(range(c.layers)), c.kv_heads, c.head_dim, c.dtype),)


def embed(ops: Any, c: LlamaConfig, w: Weights, step: Step) -> blocks.Carry:
    return blocks.embed(ops, c, w.embed, step)


def layer(
    ops: Any, c: LlamaConfig, w: Layer, carry: Any, step: Step, state: State, *,
    index: int,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    carry, state = blocks.attention(
        ops, c, w.attention, carry, step, state, index=index
    )
    return blocks.gated_mlp(ops, c, w.mlp, carry), state


def head(ops: Any, c: LlamaConfig, w: Weights, carry: Any, step: Step) -> Array:
    return blocks.head(ops, c, w.norm, w.head, carry, step)


MODEL = Model(config, weights, state, embed, layer, head)
