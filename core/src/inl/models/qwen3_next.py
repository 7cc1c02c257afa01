"""Qwen3-Next (Qwen team, 2025): gated delta nets, gated attention, many small experts.

Most layers are recurrent: a short convolution and a matrix per head, which the state
has per sequence. The others attend to a cache, with a gate on their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.errors import CheckpointError
from inl.models import blocks, groups, hybrid, llama, mlp, moe, qwen2_moe, qwen3_moe
from inl.models.config import flag, refuse_unless, whole
from inl.models.fields import with_defaults
from inl.models.rope import rope_fields
from inl.models.views import FULL
from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import Norm
from inl.ops.recurrent import Decay, Taps
from inl.spec.cache import Paged, Slotted, State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
"""Defaults of config fields that differ from Llama's."""
EXPERTS: Final = 512
"""Default number of experts."""
PERIOD: Final = 4
"""Default period of layers with attention."""
KINDS: Final = {"linear_attention": True, "full_attention": False}
"""Accepted entries of ``layer_types``, and whether the layer is recurrent."""


@dataclass(frozen=True, slots=True)
class NextConfig(moe.MoeConfig):
    """Sizes and constants of one checkpoint."""

    recurrent: tuple[bool, ...] = ()
    """Whether each layer is recurrent."""
    key_heads: int = 1
    """Heads of recurrent queries and keys, a divisor of ``value_heads``."""
    value_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1
    tiled_heads: bool = False
    """Whether value heads that share a key are ``key_heads`` apart, as in GGUF files of
    Qwen3.5, and not adjacent."""
    taps: int = 1
    """Tokens that the convolution reads, the newest included."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Attention(NamedTuple):
    """Weights of :func:`gated_attention`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    qkv: QkvLinear | Group
    gate: Linear | Group
    out: Linear | Group
    q_norm: Norm | Group
    k_norm: Norm | Group


class DeltaInputs(NamedTuple):
    """Projections of the input of :func:`delta_net`, as in :class:`Delta`."""

    mixed: Group
    gate: Group
    strength: Group
    rate: Group


class Delta(NamedTuple):
    """Weights of :func:`delta_net`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    mixed: Linear | Group
    """[channels, H]: queries, keys and values."""
    gate: Linear | Group
    strength: Linear | Group
    rate: Linear | Group
    taps: Taps | Group
    decay: Decay | Group
    inner: Norm | Group
    """[value_dim], applied to each head of the results."""
    out: Linear | Group


def config(hf: Mapping[str, Any]) -> NextConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    base = attention_config(hf, rope_fields(hf))
    sparse = qwen3_moe.sparse(base, hf, experts=EXPERTS)
    shared = whole(hf, "shared_expert_intermediate_size")
    return recurrent_config(hf, replace(sparse, shared_size=shared))


def attention_config(
    hf: Mapping[str, Any], rope: Mapping[str, Any]
) -> llama.LlamaConfig:
    """Read the fields of a dense model whose heads rotate in part."""
    refuse_unless(hf, "mlp_bias", False)
    return llama.partly_rotated(hf, rope)


def recurrent_config(hf: Mapping[str, Any], sparse: moe.MoeConfig) -> NextConfig:
    """Add the fields of recurrent layers to a config of any feed-forward layers."""
    keys = whole(hf, "linear_num_key_heads", 16)
    values = whole(hf, "linear_num_value_heads", 32)
    if values % keys:
        raise CheckpointError(
            f"config field 'linear_num_key_heads': found {keys}, expected a divisor of "
            f"linear_num_value_heads, {values}"
        )
    return llama.extended(
        NextConfig,
        sparse,
        **{name: getattr(sparse, name) for name in _MOE},
        head_norm=True,
        recurrent=_recurrent(hf, sparse.layers),
        key_heads=keys,
        value_heads=values,
        key_dim=whole(hf, "linear_key_head_dim", 128),
        value_dim=whole(hf, "linear_value_head_dim", 128),
        tiled_heads=flag(hf, "linear_heads_tiled", False),
        taps=whole(hf, "linear_conv_kernel_dim", 4, least=2),
    )


_MOE: Final = (
    "experts", "experts_per_token", "expert_size", "renormalize", "dense_layers",
    "shared_size",
)  # fmt: skip


def _recurrent(hf: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types, interval = hf.get("layer_types"), "full_attention_interval"
    if types is not None:
        hf.get(interval)  # which has no effect then
    else:
        period = whole(hf, interval, PERIOD)
        types = [list(KINDS)[(index + 1) % period == 0] for index in range(layers)]
    return hybrid.recurrent_layers(types, layers, KINDS)


def weights(
    c: NextConfig, inputs: Callable[[NextConfig, str], DeltaInputs] | None = None
) -> llama.Weights:
    """Return the weight tree, by Hugging Face tensor names.

    inputs: returns the projections of a recurrent layer; by default, those that are
    stored together by key heads.
    """
    tree = llama.weights(replace(c, layers=0))
    inputs = inputs or _delta_inputs
    return tree._replace(
        layers=tuple(_layer(c, index, inputs) for index in range(c.layers)),
        norm=groups.norm("model.norm", c.hidden_size, offset=1.0),
    )


def _layer(
    c: NextConfig, index: int, inputs: Callable[[NextConfig, str], DeltaInputs]
) -> llama.Layer:
    at = f"model.layers.{index}."
    norm = groups.norm(f"{at}post_attention_layernorm", c.hidden_size, offset=1.0)
    feed_forward: Any = (
        blocks.Mlp(norm, mlp.weights(c, f"{at}mlp"))
        if index in c.dense_layers
        else qwen2_moe.feed_forward(c, at, norm)
    )
    mixer = _delta(c, at, inputs) if c.recurrent[index] else _attention(c, at)
    return llama.Layer(mixer, feed_forward)


def _attention(c: NextConfig, at: str) -> Attention:
    """Queries and their gates alternate by heads in one tensor."""
    own, dim, h = f"{at}self_attn.", c.head_dim, c.hidden_size
    lanes = c.rope_scaling.rotary_dim
    (*turned,) = (
        lane for span in groups.rotary_rows(dim, lanes, 1) for lane in range(*span)
    )
    parts = {
        "q": ("q", groups.head_rows(turned, 2 * dim, c.heads), 2 * c.heads * dim),
        "k": ("k", groups.head_rows(turned, dim, c.kv_heads), c.kv_heads * dim),
        "v": ("v", ((0, c.kv_heads * dim),), c.kv_heads * dim),
        "gate": (
            "q",
            groups.head_rows(range(dim, 2 * dim), 2 * dim, c.heads),
            2 * c.heads * dim,
        ),
    }

    def params(name: str, weight: str, bias: str) -> dict[str, Param]:
        source, spans, total = parts[name]
        stem = f"{own}{source}_proj"
        found = {weight: groups.rows(f"{stem}.weight", spans, total, h)}
        if c.qkv_bias:
            found[bias] = groups.rows(f"{stem}.bias", spans, total)
        return found

    def norm(name: str) -> Group:
        spans = groups.head_rows(turned, dim, 1)
        weight = groups.rows(f"{own}{name}_norm.weight", spans, dim)
        return Group("rms_norm", weight=weight._replace(axis=None, offset=1.0))

    qkv: dict[str, Param] = {}
    for name in "qkv":
        qkv |= params(name, name, f"{name}_bias")
    return Attention(
        groups.norm(f"{at}input_layernorm", h, offset=1.0),
        Group("qkv_linear", **qkv),
        Group("linear", **params("gate", "weight", "bias")),
        groups.out(c, at, bias=c.out_bias),
        norm("q"),
        norm("k"),
    )


def _delta(
    c: NextConfig, at: str, inputs: Callable[[NextConfig, str], DeltaInputs]
) -> Delta:
    own, h = f"{at}linear_attn.", c.hidden_size

    def vector(name: str) -> Param:
        return Param(f"{own}{name}", (c.value_heads,), finite=True, wide=True)

    taps = Param(f"{own}conv1d.weight", (c.channels, 1, c.taps))
    return Delta(
        groups.norm(f"{at}input_layernorm", h, offset=1.0),
        *inputs(c, own),
        Group("causal_conv", weight=taps),
        Group("delta_rule", rate=vector("A_log"), shift=vector("dt_bias")),
        groups.norm(f"{own}norm", c.value_dim),
        groups.linear(f"{own}out_proj", h, c.value_heads * c.value_dim),
    )


def _delta_inputs(c: NextConfig, own: str) -> DeltaInputs:
    """Each key head has rows of its query, its key and its values in one tensor.

    GGUF files have one tensor of convolution channels, and one of gates.
    """
    h = c.hidden_size
    share = c.value_heads // c.key_heads
    inner = share * c.value_dim
    width = 2 * (c.key_dim + inner)

    def rows(
        source: str, stride: int, *ranges: tuple[int, int], alone: str = ""
    ) -> Group:
        spans: groups.Spans = ()
        for first, count in ranges:
            lanes = range(first, first + count)
            spans += groups.head_rows(lanes, stride, c.key_heads)
        total = stride * c.key_heads
        weight = groups.rows(f"{own}{source}.weight", spans, total, h)
        weight = weight._replace(axis=None)
        if alone:
            alias = Param(f"{own}{alone}.weight", weight.shape)
            weight = weight._replace(aliases=(alias,))
        return Group("linear", weight=weight)

    return DeltaInputs(
        rows("in_proj_qkvz", width, (0, c.key_dim), (c.key_dim, c.key_dim),
             (2 * c.key_dim, inner), alone="in_proj_qkv"),
        rows("in_proj_qkvz", width, (2 * c.key_dim + inner, inner), alone="in_proj_z"),
        rows("in_proj_ba", 2 * share, (0, share)),
        rows("in_proj_ba", 2 * share, (share, share)),
    )  # fmt: skip


def state(c: NextConfig) -> tuple[Paged | Slotted, ...]:
    """Return the cache group of the layers with attention, then recurrent state."""
    wide = "float64" if c.dtype == "float64" else "float32"
    found: list[Paged | Slotted] = [hybrid.attention_state(c)]
    for index in range(c.layers):
        if c.recurrent[index]:
            inputs, matrix = names(index)
            shape = c.value_heads, c.key_dim, c.value_dim
            found += [
                Slotted(
                    inputs,
                    (c.taps - 1, c.channels),
                    c.dtype,
                    "tokens",
                    ("snapshot", "drafts"),
                ),
                Slotted(matrix, shape, wide, "tokens", ("snapshot", "drafts")),
            ]
    return tuple(found)


def names(index: int) -> tuple[str, str]:
    """Return the names of the slotted state of a layer."""
    return f"conv.{index}", f"delta.{index}"


def layer(
    ops: Ops, c: NextConfig, w: llama.Layer, carry: blocks.Carry, step: Step,
    state: State, *, index: int, sampled_step: Step | None = None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    part = w.attention
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, part.norm, eps=c.norm_eps
    )
    mix = delta_net if c.recurrent[index] else gated_attention
    out, state = mix(ops, c, part, x, carry, step, state, index, sampled_step)
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    carry = carry._replace(residual=residual, delta=ops.linear(out, part.out))
    return moe.feed_forward(ops, c, w.mlp, carry), state


def gated_attention(
    ops: Ops, c: NextConfig, w: Attention, x: Array, carry: blocks.Carry, step: Step,
    state: State, index: int, sampled_step: Step | None,
) -> tuple[Array, State]:  # fmt: skip
    """Attention whose results are multiplied with the sigmoid of a gate."""
    q, k, v = blocks.split_heads(ops.qkv_linear(x, w.qkv), c.head_dim)
    q, k = blocks.norm_heads(ops, c, w, q, k)
    q, k = ops.rope(q, k, carry.cos, carry.sin)
    gate = ops.activate(ops.linear(x, w.gate), kind="sigmoid")
    if sampled_step is not None:
        gate = ops.take_rows(gate, step.samples)
    out, state = blocks.attend(
        ops, q, k, v, step, state, index=hybrid.cache_index(c, index), view=FULL,
        scale=c.head_dim**-0.5, sampled_step=sampled_step,
    )  # fmt: skip
    return out * gate, state


def delta_net(
    ops: Ops, c: NextConfig, w: Delta, x: Array, _carry: blocks.Carry, step: Step,
    state: State, index: int, sampled_step: Step | None,
) -> tuple[Array, State]:  # fmt: skip
    """Gated delta net (Yang et al., 2024). All tokens change the state."""
    inputs, matrix = names(index)
    tables = dict(state.slotted)
    mixed, tables[inputs] = ops.causal_conv(
        ops.linear(x, w.mixed), tables[inputs], step, w.taps
    )
    mixed = ops.activate(mixed, kind=c.activation)
    tokens, keys = mixed.shape[0], c.key_heads * c.key_dim
    out, tables[matrix] = ops.delta_rule(
        mixed[:, :keys].reshape(tokens, c.key_heads, c.key_dim),
        mixed[:, keys : 2 * keys].reshape(tokens, c.key_heads, c.key_dim),
        mixed[:, 2 * keys :].reshape(tokens, c.value_heads, c.value_dim),
        ops.linear(x, w.rate), ops.linear(x, w.strength), tables[matrix], step, w.decay,
        tiled=c.tiled_heads,
    )  # fmt: skip
    gate = ops.linear(x, w.gate).reshape(tokens, c.value_heads, c.value_dim)
    out = ops.rms_norm(out, w.inner, eps=c.norm_eps)
    out = ops.gated_activation(gate, out, activation="silu")
    out = out.reshape(tokens, -1)
    if sampled_step is not None:
        out = ops.take_rows(out, step.samples)
    return out, state._replace(slotted=tables)


MODEL = replace(llama.MODEL, config=config, weights=weights, state=state, layer=layer)
