"""LFM2 (Liquid AI, 2025): short convolutions between two gates beside attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, groups, hybrid, llama, moe
from inl.models.config import MAX_EPS, flag, number, whole
from inl.models.fields import changed, with_defaults
from inl.models.renames import renamed
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.recurrent import Taps
from inl.spec.cache import Paged, Slotted, State
from inl.spec.step import Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
THETA: Final = 1e6
"""Default base frequency of the rotation."""
KINDS: Final = {"conv": True, "full_attention": False, "attention": False}
"""Accepted entries of ``layer_types``, and whether the layer is a convolution."""
UNUSED: Final = (
    "block_dim", "block_norm_eps", "block_mlp_init_scale", "block_out_init_scale",
    "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
    "conv_use_xavier_init", "num_heads", "use_pos_enc",
)  # fmt: skip
"""Fields of published configs that transformers does not read."""
RENAMES: Final = {
    r"^model\.embedding_norm\.": "model.norm.",
    r"\.operator_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.self_attn\.([qk])_layernorm\.": r".self_attn.\1_norm.",
    r"\.feed_forward\.expert_bias$": ".mlp.gate.e_score_correction_bias",
    r"\.feed_forward\.": ".mlp.",
    r"\.w1\.": ".gate_proj.",
    r"\.w2\.": ".down_proj.",
    r"\.w3\.": ".up_proj.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


@dataclass(frozen=True, slots=True)
class Lfm2Config(moe.MoeConfig):
    """Sizes and constants of one checkpoint."""

    recurrent: tuple[bool, ...] = ()
    """Whether each layer is a convolution."""
    taps: int = 3
    """Tokens that the convolution reads, the newest included."""
    conv_bias: bool = False
    """Whether the convolution and the projections around it have biases."""
    rank_bias: bool = False
    """Whether experts are ranked with a bias."""


class ShortConv(NamedTuple):
    """Weights of :func:`short_conv`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    before: Linear | Group
    """[H, H]: the gate on what the convolution reads."""
    after: Linear | Group
    """[H, H]: the gate on its result."""
    value: Linear | Group
    taps: Taps | Group
    out: Linear | Group
    shift: Norm | Group | None = None
    """[H], added to the result of the convolution."""


def config(hf: Mapping[str, Any]) -> Lfm2Config:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, {})
    if "block_ff_dim" in hf:
        hf = changed(hf, intermediate_size=hf["block_ff_dim"])
    base = attention_config(hf)
    sparse: moe.MoeConfig = llama.extended(
        moe.MoeConfig, base, dense_layers=tuple(range(base.layers)),
        intermediate_size=_inner_size(hf, base.intermediate_size),
    )  # fmt: skip
    return recurrent_config(hf, sparse, _layer_types(hf, base.layers))


def attention_config(hf: Mapping[str, Any]) -> llama.LlamaConfig:
    """Read the fields of a dense model without convolutions."""
    if "tie_embedding" in hf:
        hf = changed(hf, tie_word_embeddings=hf["tie_embedding"])
    hf = with_defaults(hf, DEFAULTS)
    for name in UNUSED:
        hf.get(name)
    hf = changed(
        hf, rms_norm_eps=number(hf, "norm_eps", 1e-5, most=MAX_EPS), hidden_act="silu",
        attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    return replace(llama.config(hf, theta=THETA), head_norm=True)


def recurrent_config(
    hf: Mapping[str, Any], sparse: moe.MoeConfig, types: Any, **given: Any
) -> Lfm2Config:
    """Add the fields of convolutions; ``types`` are the kinds of the layers."""
    recurrent = hybrid.recurrent_layers(types, sparse.layers, KINDS)
    return llama.extended(
        Lfm2Config, sparse, recurrent=recurrent,
        taps=whole(hf, "conv_L_cache", 3, least=2),
        conv_bias=flag(hf, "conv_bias", False), **given,
    )  # fmt: skip


def _layer_types(hf: Mapping[str, Any], layers: int) -> Any:
    if hf.get("layer_types") is not None:
        hf.get("full_attn_idxs")  # which has no effect then
        return hf["layer_types"]
    listed = hf.get("full_attn_idxs")
    if listed is None:
        listed = [*range(layers)]
    return hybrid.listed_kinds(listed, layers, KINDS, "full_attn_idxs")


def _inner_size(hf: Mapping[str, Any], size: int) -> int:
    """Return the inner size of feed-forward layers, as the config adjusts it."""
    multiple = whole(hf, "block_multiple_of", 256)
    factor = number(hf, "block_ffn_dim_multiplier", 1.0)
    if not flag(hf, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if "block_ffn_dim_multiplier" in hf and hf["block_ffn_dim_multiplier"] is None:
        return size
    return -(-int(factor * size) // multiple) * multiple


def weights(c: Lfm2Config) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    return with_convolutions(c, llama.weights(c))


def with_convolutions(c: Lfm2Config, tree: llama.Weights) -> llama.Weights:
    """Return a tree with convolutions in place of attention where they are."""
    layers = tuple(
        layer._replace(attention=_conv(c, f"model.layers.{index}."))
        if c.recurrent[index]
        else layer
        for index, layer in enumerate(tree.layers)
    )
    return tree._replace(layers=layers)


def _conv(c: Lfm2Config, at: str) -> ShortConv:
    own, h = f"{at}conv.", c.hidden_size

    def projection(index: int) -> Group:
        spans = ((index * h, (index + 1) * h),)
        params = {"weight": groups.rows(f"{own}in_proj.weight", spans, 3 * h, h)}
        if c.conv_bias:
            params["bias"] = groups.rows(f"{own}in_proj.bias", spans, 3 * h)
        return Group("linear", **params)

    shift = Group("rms_norm", weight=Param(f"{own}conv.bias", (h,)))
    before, after, value = map(projection, range(3))
    return ShortConv(
        groups.norm(f"{at}input_layernorm", h),
        before,
        after,
        value,
        Group("causal_conv", weight=Param(f"{own}conv.weight", (h, 1, c.taps))),
        groups.linear(f"{own}out_proj", h, h, bias=c.conv_bias),
        shift if c.conv_bias else None,
    )


def state(c: Lfm2Config) -> tuple[Paged | Slotted, ...]:
    """Return the cache group of the layers with attention, then the convolutions'."""
    shape = c.taps - 1, c.hidden_size
    return (
        hybrid.attention_state(c),
        *(
            Slotted(_name(index), shape, c.dtype, "tokens", ("snapshot", "drafts"))
            for index, recurs in enumerate(c.recurrent)
            if recurs
        ),
    )


def _name(index: int) -> str:
    """Return the name of the slotted state of a layer."""
    return f"conv.{index}"


def layer(
    ops: Ops, c: Lfm2Config, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    if c.recurrent[index]:
        carry, state = short_conv(
            ops, c, w.attention, carry, step, state, index, sampled_step
        )
    else:
        carry, state = blocks.attention(
            ops, c, w.attention, carry, step, state,
            index=hybrid.cache_index(c, index), sampled_step=sampled_step,
        )  # fmt: skip
    return moe.feed_forward(ops, c, w.mlp, carry), state


def short_conv(
    ops: Ops, c: Lfm2Config, w: ShortConv, carry: blocks.Carry, step: Step,
    state: State, index: int, sampled_step: Step | None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Convolution block: ``out(after * conv(before * value))``."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    tables = dict(state.slotted)
    given = ops.linear(x, w.before) * ops.linear(x, w.value)
    mixed, tables[_name(index)] = ops.causal_conv(
        given, tables[_name(index)], step, w.taps
    )
    if w.shift is not None:
        mixed = mixed + groups.vector(w.shift)
    mixed = ops.linear(x, w.after) * mixed
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
        mixed = ops.take_rows(mixed, step.samples)
    carry = carry._replace(residual=residual, delta=ops.linear(mixed, w.out))
    return carry, state._replace(slotted=tables)


def adapt(
    c: Lfm2Config, checkpoint: Checkpoint
) -> tuple[Lfm2Config, AdaptedCheckpoint]:
    """Rename tensors."""
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, state=state, layer=layer, adapt=adapt
)
