"""Trinity (Arcee AI, 2025): gated attention, norms around blocks, sigmoid scores.

Only layers with a window rotate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.checkpoints.adapted import AdaptedCheckpoint
from inl.checkpoints.checkpoint import Checkpoint
from inl.models import blocks, flex_olmo, groups, llama, mlp, post_norm, sigmoid_moe
from inl.models.config import flag, refuse_unless, whole
from inl.models.fields import changed, with_defaults
from inl.models.moe import MoeConfig
from inl.models.renames import renamed
from inl.models.views import one_full_in, views, windows
from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.step import Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

DEFAULTS: Final = {
    "max_position_embeddings": 16384, "head_dim": 128, "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408, "num_dense_layers": 1, "num_experts": 64,
    "num_experts_per_tok": 6, "num_shared_experts": 2, "sliding_window": 1024,
    "route_scale": 1.0, "mup_enabled": False,
}  # fmt: skip
"""Defaults of config fields that differ from Llama's."""
PERIOD: Final = 4
"""Default period of layers without a window."""
RENAMES: Final = {
    r"\.mlp\.expert_bias$": ".mlp.gate.e_score_correction_bias",
    r"\.mlp\.router\.gate\.": ".mlp.gate.",
}
"""Parts of tensor names, as patterns, and what they are in this file."""


@dataclass(frozen=True, slots=True)
class AfmoeConfig(MoeConfig):
    """Sizes and constants of one checkpoint."""

    embed_scale: float = 1.0


class Attention(NamedTuple):
    """Weights of :func:`attention`: groups, replaced by tensors when loaded."""

    qkv: QkvLinear | Group
    gate: Linear | Group
    """[heads * head_dim, H]."""
    out: Linear | Group
    post: Norm | Group
    norm: Norm | Group
    q_norm: Norm | Group
    k_norm: Norm | Group


def config(hf: Mapping[str, Any]) -> AfmoeConfig:
    """Read a Hugging Face config; raises :class:`CheckpointError` naming the field."""
    hf = with_defaults(hf, DEFAULTS)
    refuse_unless(hf, "mlp_bias", False)
    base = replace(llama.config(hf), head_norm=True)
    period = whole(hf, "global_attn_every_n_layers", PERIOD)
    found = windows(hf, one_full_in(base.layers, period=period))
    base = replace(base, views=views(found, [window is not None for window in found]))
    hf = changed(
        hf, n_routed_experts=whole(hf, "num_experts"), n_group=1, topk_group=1,
        n_shared_experts=whole(hf, "num_shared_experts"), norm_topk_prob=True,
        routed_scaling_factor=hf["route_scale"],
        first_k_dense_replace=whole(hf, "num_dense_layers", least=0),
    )  # fmt: skip
    sparse = sigmoid_moe.sparse(base, hf, renormalize=True)
    scale = base.hidden_size**0.5 if flag(hf, "mup_enabled", False) else 1.0
    return llama.extended(AfmoeConfig, sparse, embed_scale=scale)


def weights(c: AfmoeConfig) -> llama.Weights:
    """Return the weight tree, by the names of :func:`adapt`."""
    layers = tuple(_layer(c, index) for index in range(c.layers))
    return llama.weights(replace(c, layers=0))._replace(layers=layers)


def _layer(c: AfmoeConfig, index: int) -> llama.Layer:
    at, lanes = f"model.layers.{index}.", c.heads * c.head_dim

    def norm(name: str, size: int = c.hidden_size) -> Group:
        return groups.norm(f"{at}{name}", size)

    attention = Attention(
        groups.qkv(c, at, bias=c.qkv_bias),
        groups.linear(f"{at}self_attn.gate_proj", lanes, c.hidden_size, axis=0),
        groups.out(c, at, bias=c.out_bias),
        norm("post_attention_layernorm"),
        norm("input_layernorm"),
        norm("self_attn.q_norm", c.head_dim),
        norm("self_attn.k_norm", c.head_dim),
    )
    before, after = norm("pre_mlp_layernorm"), norm("post_mlp_layernorm")
    if index in c.dense_layers:
        inner = post_norm.Mlp(mlp.weights(c, f"{at}mlp"), after, before)
        return llama.Layer(attention, inner)
    mixture = sigmoid_moe.feed_forward(c, at, before)._replace(norm=None)
    return llama.Layer(attention, flex_olmo.Mixture(mixture, after, before))


def embed(ops: Ops, c: AfmoeConfig, w: llama.Weights, step: Step) -> blocks.Carry:
    carry = blocks.embed(ops, c, w.embed, step)
    return carry._replace(residual=carry.residual * c.embed_scale)


def layer(
    ops: Ops, c: AfmoeConfig, w: llama.Layer, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None = None,
) -> tuple[Any, State]:  # fmt: skip
    carry, state = attention(
        ops, c, w.attention, carry, step, state, index=index, sampled_step=sampled_step
    )
    if isinstance(w.mlp, flex_olmo.Mixture):
        return flex_olmo.feed_forward(ops, c, w.mlp, carry), state
    return post_norm.gated_mlp(ops, c, w.mlp, carry), state


def attention(
    ops: Ops, c: AfmoeConfig, w: Attention, carry: Any, step: Step, state: State, *,
    index: int, sampled_step: Step | None,
) -> tuple[Any, State]:  # fmt: skip
    """Attention block with a gate for each lane of its result, and norms around it."""
    view = c.views[index]
    residual, x = post_norm.enter(ops, c, carry, w.norm)
    q, k, v = blocks.split_heads(ops.qkv_linear(x, w.qkv), c.head_dim)
    q, k = blocks.norm_heads(ops, c, w, q, k)
    if view.rotated:
        q, k = ops.rope(q, k, *carry.tables(view))
    out, state = blocks.attend(
        ops, q, k, v, step, state, index=index, view=view, scale=c.head_dim**-0.5,
        sampled_step=sampled_step,
    )  # fmt: skip
    if sampled_step is not None:
        residual, x = (ops.take_rows(each, step.samples) for each in (residual, x))
    out = out * ops.activate(ops.linear(x, w.gate), kind="sigmoid")
    delta = post_norm.leave(ops, c, ops.linear(out, w.out), w.post)
    return carry._replace(residual=residual, delta=delta), state


def adapt(
    c: AfmoeConfig, checkpoint: Checkpoint
) -> tuple[AfmoeConfig, AdaptedCheckpoint]:
    """Rename tensors."""
    return c, renamed(checkpoint, RENAMES)


MODEL = replace(
    llama.MODEL, config=config, weights=weights, embed=embed, layer=layer,
    head=post_norm.gathered_head, adapt=adapt,
)  # fmt: skip
