"""Building blocks of both complexity-deep architectures."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from inl.models import blocks, groups
from inl.models.deep_config import HEAD_EPS, RoutedConfig
from inl.models.views import View
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear, QkvLinear
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param

if TYPE_CHECKING:
    from inl.ops.protocol import Ops


class MuAttention(NamedTuple):
    """Weights of :func:`attend`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    qkv: QkvLinear | Group
    out: Linear | Group
    mu_qkv: QkvLinear | Group | None = None
    """Projection of mu, added to queries, keys and values; ``None`` adds nothing."""
    q_norm: Norm | Group | None = None
    k_norm: Norm | Group | None = None


class RopeTables(NamedTuple):
    """Rotation tables of all tokens, shared by all layers."""

    cos: Array
    """[T, head_dim / 2] float32."""
    sin: Array
    """[T, head_dim / 2] float32."""


class Ends(NamedTuple):
    """Weight groups before and after the layers."""

    embed: Group
    norm: Group
    head: Group


def ends(c: RoutedConfig) -> Ends:
    """Return embedding, final norm and head; a tied model shares the embedding."""
    last = groups.norm("model.norm", c.hidden_size)
    return Ends(groups.table(c), last, groups.head(c))


def attention_groups(c: RoutedConfig, at: str, *, mu: bool) -> MuAttention:
    """Return the attention weights of the layer with name prefix ``at``.

    Heads are sharded over tensor-parallel ranks. mu: whether it has ``mu_qkv``.
    """
    prefix, h = f"{at}self_attn.", c.hidden_size
    heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
    mu_qkv = Group(
        "qkv_linear",
        **{
            key: Param(f"{prefix}mu_to_{key}.weight", (count * c.head_dim, h), axis=0)
            for key, count in heads.items()
        },
    )
    head_norms = (
        groups.norm(f"{prefix}q_norm", c.head_dim),
        groups.norm(f"{prefix}k_norm", c.head_dim),
    )
    return MuAttention(
        norm=groups.norm(f"{at}input_layernorm", h),
        qkv=groups.qkv(c, at),
        out=groups.out(c, at),
        mu_qkv=mu_qkv if mu else None,
        q_norm=head_norms[0] if c.qk_norm else None,
        k_norm=head_norms[1] if c.qk_norm else None,
    )


def routed_group(c: RoutedConfig, at: str) -> Group:
    """Return the expert weights of the layer with name prefix ``at``, replicated."""
    experts, h, inner = c.experts, c.hidden_size, c.expert_size
    params = {
        "gate_up": Param(f"{at}mlp.gate_up_proj", (experts, h, 2 * inner)),
        "down": Param(f"{at}mlp.down_proj", (experts, inner, h)),
    }
    if c.mu_router:
        params["router"] = Param(f"{at}mlp.mu_router.weight", (experts, h))
    if c.expert_table:
        params["experts"] = Param(f"{at}mlp.token_to_expert", (c.vocab_size,))
    return Group("token_routed_mlp", **params)


def begin(
    ops: Ops, c: RoutedConfig, w: Embedding | Group, step: Step
) -> tuple[Array, RopeTables]:
    """Look up the embeddings and compute the rotation tables."""
    cos, sin = blocks.rotation(ops, c.head_dim, step, c.rope_theta, c.rope_scaling)
    return ops.embedding(step.tokens, w), RopeTables(cos, sin)


def attend(
    ops: Ops,
    c: RoutedConfig,
    w: MuAttention,
    x: Array,
    mu: Array,
    rope: RopeTables,
    step: Step,
    state: State,
    *,
    index: int,
    sampled_step: Step | None = None,
) -> tuple[Array, State]:
    """Attention with a projection of mu added to queries, keys and values.

    Returns this rank's partial sum [T, H] and the state; with ``sampled_step``, [R, H]
    of the sampled tokens.
    """
    q, k, v = ops.qkv_linear(x, w.qkv)
    if w.mu_qkv is not None:
        mu_q, mu_k, mu_v = ops.qkv_linear(mu, w.mu_qkv)
        q, k, v = q + mu_q, k + mu_k, v + mu_v
    dim = c.head_dim
    q, k, v = blocks.split_heads((q, k, v), dim)
    if c.qk_norm and w.q_norm is not None and w.k_norm is not None:
        q = ops.rms_norm(q, w.q_norm, eps=HEAD_EPS)
        k = ops.rms_norm(k, w.k_norm, eps=HEAD_EPS)
    q, k = ops.rope(q, k, rope.cos, rope.sin)
    out, state = blocks.attend(
        ops, q, k, v, step, state,
        index=index, view=View(c.window), scale=dim**-0.5, sampled_step=sampled_step,
    )  # fmt: skip
    return ops.linear(out, w.out), state


def head(
    ops: Ops,
    c: RoutedConfig,
    norm: Norm | Group,
    w: Linear | Group,
    residual: Array,
    step: Step,
) -> Array:
    """Logits [S, V] of the sampled tokens."""
    x = ops.rms_norm(ops.take_rows(residual, step.samples), norm, eps=c.norm_eps)
    return ops.all_gather(ops.linear(x, w), axis="tensor")
