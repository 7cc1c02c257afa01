"""GPT-OSS (OpenAI, 2025): attention sinks, alternating windows, biased experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray
from inl.models import blocks, groups, llama, moe
from inl.models.config import fields_of, number, refuse_unless
from inl.models.fields import changed, with_defaults
from inl.models.rope import ignored, read_rope
from inl.models.views import alternating, views, windows
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.moe import ExpertLinear
from inl.ops.norm import Norm
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

THETA: Final = 150000.0
DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
"""Defaults of config fields that differ from Llama's."""
ROPE: Final = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Rotation of a config that has none."""


@dataclass(frozen=True, slots=True)
class GptOssConfig(moe.MoeConfig):
    """Sizes and constants of one checkpoint."""

    gate_gain: float = 1.702
    """Factor in the sigmoid of the gate."""
    gate_limit: float = 7.0
    """Upper limit of the gate, and limit of the size of its other factor."""


class Mixture(NamedTuple):
    """Weights of :func:`mixture`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    router: Linear | Group
    gate: ExpertLinear | Group
    up: ExpertLinear | Group
    down: ExpertLinear | Group
    gate_bias: Embedding | Group
    """[E, I]: a row for each expert."""
    up_bias: Embedding | Group
    down_bias: Embedding | Group
    """[E, H]."""


def config(hf: Mapping[str, Any]) -> GptOssConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    if not fields_of(hf, "rope_parameters"):
        hf = changed(hf, rope_parameters=ROPE)
    refuse_unless(hf, "mlp_bias", False)
    # transformers computes the experts of this family with another activation.
    base = llama.with_rope(changed(hf, hidden_act="silu"), read_rope(hf, theta=THETA))
    base = replace(base, views=views(windows(hf, alternating(base.layers))))
    sparse = moe.with_experts(
        base, hf, count="num_local_experts", expert_size=base.intermediate_size
    )
    given = hf.get("experts_per_token")
    if given not in (None, sparse.experts_per_token):
        ignored(hf, "experts_per_token")
    return llama.extended(
        GptOssConfig,
        sparse,
        gate_gain=number(hf, "swiglu_alpha", 1.702),
        gate_limit=number(hf, "swiglu_limit", 7.0),
    )


def weights(c: GptOssConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    layers = tuple(_layer(c, f"model.layers.{index}.") for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: GptOssConfig, at: str) -> llama.Layer:
    attention = llama.layer_weights(c, at).attention
    sinks = Param(f"{at}self_attn.sinks", (c.heads,), axis=0)
    attention = attention._replace(sinks=Group("sink_attention", logits=sinks))
    norm = groups.norm(f"{at}post_attention_layernorm", c.hidden_size)
    return llama.Layer(attention, _mixture(c, f"{at}mlp.", norm))


def _mixture(c: GptOssConfig, at: str, norm: Group) -> Mixture:
    count, h, inner = c.experts, c.hidden_size, c.expert_size

    def matrix(name: str, rows: int, columns: int, axis: int) -> Group:
        source = f"{at}experts.{name}_proj.weight"
        return Group(
            "expert_linear", weight=Param(source, (count, rows, columns), axis=axis)
        )

    def bias(name: str, size: int, **given: Any) -> Group:
        source = f"{at}experts.{name}_proj.bias"
        return Group("embedding", weight=Param(source, (count, size), **given))

    router = Param(f"{at}router.weight", (count, h), finite=True)
    return Mixture(
        norm,
        Group("linear", weight=router, bias=Param(f"{at}router.bias", (count,))),
        matrix("gate", inner, h, 1),
        matrix("up", inner, h, 1),
        matrix("down", h, inner, 2),
        bias("gate", inner, axis=1),
        bias("up", inner, axis=1),
        bias("down", h, partial=True, expert_partial=True),
    )


def mixture(ops: Ops, c: GptOssConfig, w: Mixture, carry: blocks.Carry) -> blocks.Carry:
    """Mixture-of-experts block whose experts have biases and a clamped gate."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    ids, shares = ops.route(
        ops.linear(x, w.router), k=c.experts_per_token, kind="topk_softmax",
        renormalize=False,
    )  # fmt: skip

    def expert(x: Any, matrix: Any, bias: Any) -> Any:
        y = ops.expert_linear(x, ids, matrix)
        return y + ops.embedding(ids.reshape(-1), bias).reshape(*y.shape)

    slots = x.reshape(x.shape[0], 1, x.shape[1])
    gate, up = expert(slots, w.gate, w.gate_bias), expert(slots, w.up, w.up_bias)
    gate = ops.clip(gate, low=-np.inf, high=c.gate_limit)
    up = ops.clip(up, low=-c.gate_limit, high=c.gate_limit)
    inner = ops.silu(gate * c.gate_gain) * (1 / c.gate_gain) * (up + 1.0)
    delta = ops.combine_experts(expert(inner, w.down, w.down_bias), shares)
    return carry._replace(residual=residual, delta=delta)


layer = partial(blocks.layer, mixture)


def adapt(
    c: GptOssConfig, checkpoint: Checkpoint
) -> tuple[GptOssConfig, AdaptedCheckpoint]:
    """Separate gate and up rows, which alternate; transpose unquantized experts.

    Experts are stored as [E, in, out], quantized ones as [E, out, in].
    """
    pieces: dict[str, Piece] = {}
    for name in checkpoint.names():
        stem, _, kind = name.rpartition(".experts.")
        fused = kind.removesuffix(".weight").removesuffix("_bias")
        if not stem or fused not in ("gate_up_proj", "down_proj"):
            pieces[name] = Piece((name,), checkpoint.spec(name)[1])
            continue
        field = "bias" if kind.endswith("_bias") else "weight"
        turned = kind == fused
        for place, part in enumerate(PARTS[fused]):
            make = partial(_separated, place, len(PARTS[fused]), turned)
            shape = _shape(checkpoint.spec(name)[1], len(PARTS[fused]), turned)
            pieces[f"{stem}.experts.{part}_proj.{field}"] = Piece((name,), shape, make)
    return c, AdaptedCheckpoint(checkpoint, pieces)


PARTS: Final = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""Matrices of a stored tensor."""


def _shape(shape: tuple[int, ...], count: int, turned: bool) -> tuple[int, ...]:
    """Shape of one of ``count`` matrices that a tensor of experts stores."""
    first, *rest = (shape[0], *reversed(shape[1:])) if turned else shape
    return (first, rest[0] // count, *rest[1:]) if rest else shape


def _separated(place: int, count: int, turned: bool, stored: Any) -> HostArray:
    """Every ``count``-th row of the matrices [out, in], from row ``place``."""
    (array,) = stored
    data = array.data.swapaxes(1, 2) if turned else array.data
    shape = _shape(array.shape, count, turned)
    return HostArray(np.ascontiguousarray(data[:, place::count]), array.dtype, shape)


MODEL = replace(llama.MODEL, config=config, weights=weights, layer=layer, adapt=adapt)
