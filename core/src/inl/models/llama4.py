"""Llama 4, text (Meta, 2025): attention in chunks, layers without rotation, experts.

Layers that rotate attend to their chunk of the text; the others attend to all of it,
with queries that grow with positions. Inputs of experts, not their outputs, are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.checkpoints.files.tensor_file import show
from inl.dtypes import HostArray, cast
from inl.errors import CheckpointError
from inl.models import blocks, groups, llama, mlp, moe
from inl.models.config import flag, number, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.rope import read_rope
from inl.models.smollm3 import rotated_layers
from inl.models.views import views
from inl.ops.linear import Linear
from inl.ops.mlp import GatedMlp
from inl.ops.moe import ExpertLinear
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

THETA: Final = 5e5
DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
}
"""Defaults of config fields that differ from Llama's."""
KINDS: Final = {"chunked_attention": True, "full_attention": False}
"""Accepted entries of ``layer_types``, and whether the layer attends in chunks."""


@dataclass(frozen=True, slots=True)
class Llama4Config(moe.MoeConfig):
    """Sizes and constants of one checkpoint; the window of a view is its chunk."""

    dense_size: int = 1
    """Inner size of layers without experts."""
    floor: int = 1
    """Tokens at which queries of layers without rotation begin to grow."""
    gain: float = 0.0
    """Rate at which they grow."""


class Carry(NamedTuple):
    """Activations, and the step of layers that attend in chunks."""

    residual: Array
    delta: Array
    cos: Array
    sin: Array
    chunked: Step


class Mixture(NamedTuple):
    """Weights of :func:`mixture`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    router: Linear | Group
    gate: ExpertLinear | Group
    up: ExpertLinear | Group
    down: ExpertLinear | Group
    shared: GatedMlp | Group


def config(hf: Mapping[str, Any]) -> Llama4Config:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    base = llama.with_rope(hf, read_rope(hf, theta=THETA))
    if hf.get("no_rope_layers") == []:
        hf = changed(hf, no_rope_layers=None)
    rotated = rotated_layers(hf, base.layers)
    base = replace(
        base, views=views(_chunks(hf, rotated, base.max_tokens), rotated),
        head_norm=flag(hf, "use_qk_norm", True),
    )  # fmt: skip
    sparse = moe.with_experts(
        base, hf, count="num_local_experts", expert_size=base.intermediate_size,
        dense_layers=_dense_layers(hf, base.layers),
    )  # fmt: skip
    tempered = flag(hf, "attn_temperature_tuning", True)
    return llama.extended(
        Llama4Config, sparse,
        **{name: getattr(sparse, name) for name in _MOE},
        dense_size=whole(hf, "intermediate_size_mlp"),
        floor=whole(hf, "floor_scale"),
        gain=number(hf, "attn_scale", 0.1) if tempered else 0.0,
    )  # fmt: skip


_MOE: Final = ("experts", "experts_per_token", "expert_size", "dense_layers")


def _chunks(
    hf: Mapping[str, Any], rotated: tuple[bool, ...], max_tokens: int
) -> tuple[int | None, ...]:
    """Return the chunk of each layer; ``None`` is the whole text."""
    listed = hf.get("layer_types")
    if listed is None:
        chunked = list(rotated)
    elif (
        isinstance(listed, list)
        and len(listed) == len(rotated)
        and all(isinstance(kind, str) and kind in KINDS for kind in listed)
    ):
        chunked = [KINDS[kind] for kind in listed]
    else:
        raise CheckpointError(
            f"config field 'layer_types': found {show(listed)}, expected a list of "
            f"{len(rotated)} of: {', '.join(KINDS)}"
        )
    if not any(chunked):
        return (None,) * len(rotated)
    size = whole(hf, "attention_chunk_size")
    return tuple(size if one and size < max_tokens else None for one in chunked)


def _dense_layers(hf: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without experts."""
    listed, step = hf.get("moe_layers"), whole(hf, "interleave_moe_layer_step", 1)
    if listed is None:
        return tuple(index for index in range(layers) if (index + 1) % step)
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise CheckpointError(
            f"config field 'moe_layers': found {show(listed)}, expected a list of "
            "layer numbers"
        )
    return tuple(index for index in range(layers) if index not in listed)


def weights(c: Llama4Config) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    layers = tuple(_layer(c, index) for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: Llama4Config, index: int) -> llama.Layer:
    at = f"model.layers.{index}."
    normed = c.head_norm and c.views[index].rotated
    name = f"{at}self_attn.qk_norm"
    norms = [groups.norm(name, c.head_dim) if normed else None for _ in range(2)]
    attention = blocks.Attention(
        groups.norm(f"{at}input_layernorm", c.hidden_size),
        groups.qkv(c, at, bias=c.qkv_bias, interleaved=True),
        groups.out(c, at, bias=c.out_bias),
        *norms,
    )
    norm = groups.norm(f"{at}post_attention_layernorm", c.hidden_size)
    stem = f"{at}feed_forward"
    if index in c.dense_layers:
        dense = replace(c, intermediate_size=c.dense_size)
        return llama.Layer(attention, blocks.Mlp(norm, mlp.weights(dense, stem)))
    return llama.Layer(attention, _mixture(c, stem, norm))


def _mixture(c: Llama4Config, stem: str, norm: Group) -> Mixture:
    count, h, inner = c.experts, c.hidden_size, c.expert_size

    def matrix(name: str, rows: int, columns: int, axis: int) -> Group:
        shape = count, rows, columns
        whole = Param(f"{stem}.experts.{name}_proj.weight", shape, axis=axis)
        source = f"{stem}.experts.{{}}.{name}_proj.weight"
        each = whole._replace(source=source, stack=count, aliases=(whole,))
        return Group("expert_linear", weight=each)

    return Mixture(
        norm,
        moe.router(c, f"{stem}.router.weight"),
        matrix("gate", inner, h, 1),
        matrix("up", inner, h, 1),
        matrix("down", h, inner, 2),
        groups.gated(f"{stem}.shared_expert", h, inner),
    )


def embed(ops: Ops, c: Llama4Config, w: llama.Weights, step: Step) -> Carry:
    carry = blocks.embed(ops, c, w.embed, step)
    return Carry(*carry, _chunked(ops, c, step))


def _chunked(ops: Ops, c: Llama4Config, step: Step) -> Step:
    """Return the step of layers with chunks: the same one for texts of one chunk."""
    chunk = next((view.window for view in c.views if view.window), None)
    if chunk is None or step.blocks.shape[2] * ops.block_size <= chunk:
        return step
    rows = ops.chunk_rows(step, chunk=chunk, block_size=ops.block_size)
    return rows._replace(plan=ops.plan(rows, block_size=ops.block_size))


def attention(
    ops: Ops, c: Llama4Config, w: blocks.Attention, carry: Carry, step: Step,
    state: State, *, index: int, sampled_step: Step | None = None,
) -> tuple[Carry, State]:  # fmt: skip
    """Attention block over the whole text, or over the tokens of a chunk."""
    view = c.views[index]
    residual, *projected = ops.norm_qkv(
        carry.residual, carry.delta, w.norm, w.qkv, eps=c.norm_eps
    )
    q, k, v = blocks.split_heads(projected, c.head_dim)
    if view.rotated:
        q, k = ops.rope(q, k, carry.cos, carry.sin)
        q, k = blocks.norm_heads(ops, c, w, q, k)
    elif c.gain and c.max_tokens >= c.floor:
        q = ops.temper_queries(q, step.positions, floor=c.floor, gain=c.gain)
    scale = c.head_dim**-0.5
    if view.window is None or carry.chunked is step:
        out, state = blocks.attend(
            ops, q, k, v, step, state, index=index, view=view._replace(window=None),
            scale=scale, sampled_step=sampled_step,
        )  # fmt: skip
    else:
        cache = ops.write_kv(k, v, state.caches[index], step.writes[view.group])
        seen = carry.chunked
        if sampled_step is not None:
            q, seen = ops.take_rows(q, step.samples), _chunked(ops, c, sampled_step)
        out = ops.attention(
            q, cache, seen, scale=scale, window=None, cap=None, group=view.group
        )
        out = out.reshape(out.shape[0], -1)
        caches = (*state.caches[:index], cache, *state.caches[index + 1 :])
        state = state._replace(caches=caches)
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    delta = ops.linear(out, w.out)
    return carry._replace(residual=residual, delta=delta), state


def mixture(ops: Ops, c: Llama4Config, w: Mixture, carry: Any) -> Any:
    """Mixture-of-experts block: scaled inputs, and an expert for every token."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    ids, shares = ops.route(
        ops.linear(x, w.router), k=c.experts_per_token, kind="sigmoid",
        renormalize=False,
    )  # fmt: skip
    slots, one = x.reshape(x.shape[0], 1, x.shape[1]), shares.reshape(-1, 1)

    def scaled(matrix: Any) -> Any:
        y = ops.expert_linear(slots, ids, matrix)
        return ops.combine_experts(y.reshape(one.shape[0], 1, -1), one)

    inner = ops.gated_activation(
        scaled(w.gate), scaled(w.up), activation=c.activation
    ).reshape(*ids.shape, -1)
    out = ops.expert_linear(inner, ids, w.down)
    delta = ops.combine_experts(out, ops.zeros_like(shares) + 1.0)
    shared = ops.gated_mlp(x, w.shared, activation=c.activation)
    return carry._replace(residual=residual, delta=delta + shared)


def layer(
    ops: Ops, c: Llama4Config, w: llama.Layer, carry: Carry, step: Step, state: State,
    *, index: int, sampled_step: Step | None = None,
) -> tuple[Carry, State]:  # fmt: skip
    carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    run: Any = blocks.gated_mlp if index in c.dense_layers else mixture
    return run(ops, c, w.mlp, carry), state


def adapt(
    c: Llama4Config, checkpoint: Checkpoint
) -> tuple[Llama4Config, AdaptedCheckpoint]:
    """Separate and transpose the experts [E, in, out]; add norms that files lack."""
    pieces: dict[str, Piece] = {}
    for name in checkpoint.names():
        shape = checkpoint.spec(name)[1]
        stem, _, kind = name.rpartition(".experts.")
        if kind not in PARTS or len(shape) != EXPERT_RANK:
            pieces[name] = Piece((name,), shape)
            continue
        parts = PARTS[kind]
        for place, part in enumerate(parts):
            turned = shape[0], shape[2] // len(parts), shape[1]
            make = partial(_turned, place, turned)
            pieces[f"{stem}.experts.{part}_proj.weight"] = Piece((name,), turned, make)
    for index, view in enumerate(c.views):
        at = f"model.layers.{index}."
        source = f"{at}input_layernorm.weight"
        if c.head_norm and view.rotated and source in pieces:
            piece = Piece((source,), (c.head_dim,), partial(_ones, c.head_dim))
            pieces[f"{at}self_attn.qk_norm.weight"] = piece
    return c, AdaptedCheckpoint(checkpoint, pieces)


PARTS: Final = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
"""Matrices of a stored tensor, one after the other."""
EXPERT_RANK: Final = 3


def _turned(place: int, shape: tuple[int, ...], stored: Any) -> HostArray:
    (array,) = stored
    columns = slice(place * shape[1], (place + 1) * shape[1])
    data = np.ascontiguousarray(array.data[:, :, columns].swapaxes(1, 2))
    return HostArray(data, array.dtype, shape)


def _ones(size: int, stored: Any) -> HostArray:
    """Return the weight of a norm that transformers computes without one."""
    return cast(np.ones(size, np.float32), stored[0].dtype)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, embed=embed, layer=layer, adapt=adapt
)
