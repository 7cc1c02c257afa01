"""What both complexity-deep designs are composed of."""

from __future__ import annotations

from typing import Any, NamedTuple

from inl.models import blocks, groups
from inl.models.deep_config import HEAD_EPS, RoutedConfig
from inl.models.views import View
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.protocol import Ops
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group, Param


class MuAttention(NamedTuple):
    """Groups of :func:`attend`, then their tensors."""

    norm: Any
    qkv: Any
    out: Any
    mu_qkv: Any = None
    """What mu adds to queries, keys and values; ``None`` adds nothing."""
    q_norm: Any = None
    k_norm: Any = None


class RopeTables(NamedTuple):
    """Rotation of every token, the same in each layer."""

    cos: Array
    """[T, head_dim / 2] float32."""
    sin: Array
    """[T, head_dim / 2] float32."""


class Ends(NamedTuple):
    """Groups before and behind the layers."""

    embed: Group
    norm: Group
    head: Group


def ends(c: RoutedConfig) -> Ends:
    """Embedding, last norm, and head, which a tied model takes from the first."""
    last = groups.norm("model.norm", c.hidden_size)
    return Ends(groups.table(c), last, groups.head(c))


def attention_groups(c: RoutedConfig, at: str, *, mu: bool) -> MuAttention:
    """Weights of the layer ``at``; its heads are cut over tensor-parallel ranks."""
    near, h = f"{at}self_attn.", c.hidden_size
    heads = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
    moved = Group(
        "qkv_linear",
        **{
            key: Param(f"{near}mu_to_{key}.weight", (count * c.head_dim, h), axis=0)
            for key, count in heads.items()
        },
    )
    each = (
        groups.norm(f"{near}q_norm", c.head_dim),
        groups.norm(f"{near}k_norm", c.head_dim),
    )
    return MuAttention(
        norm=groups.norm(f"{at}input_layernorm", h),
        qkv=groups.qkv(c, at),
        out=groups.out(c, at),
        mu_qkv=moved if mu else None,
        q_norm=each[0] if c.qk_norm else None,
        k_norm=each[1] if c.qk_norm else None,
    )


def routed_group(c: RoutedConfig, at: str) -> Group:
    """Experts of the layer ``at``, whole on every rank."""
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
    ops: Ops, c: RoutedConfig, w: Embedding, step: Step
) -> tuple[Array, RopeTables]:
    """Look the tokens up, and prepare their rotation."""
    cos, sin = ops.rope_table(
        step.positions, dim=c.head_dim, theta=c.rope_theta, scaling=c.rope_scaling
    )
    return ops.embedding(step.tokens, w), RopeTables(cos, sin)


def attend(
    ops: Ops,
    c: RoutedConfig,
    w: MuAttention,
    x: Array,
    mu: Array,
    turn: RopeTables,
    step: Step,
    state: State,
    *,
    index: int,
    sampled_step: Step | None = None,
) -> tuple[Array, State]:
    """Attention whose queries, keys and values mu moves: this rank's part [T, H].

    With the step of the sampled tokens it is theirs alone, [R, H].
    """
    parts = ops.qkv_linear(x, w.qkv)
    if w.mu_qkv is not None:
        moved = ops.qkv_linear(mu, w.mu_qkv)
        parts = tuple(part + more for part, more in zip(parts, moved, strict=True))
    dim = c.head_dim
    q, k, v = (part.reshape(part.shape[0], -1, dim) for part in parts)
    if c.qk_norm:
        q = ops.rms_norm(q, w.q_norm, eps=HEAD_EPS)
        k = ops.rms_norm(k, w.k_norm, eps=HEAD_EPS)
    q, k = ops.rope(q, k, turn.cos, turn.sin)
    out, state = blocks.attend(
        ops, q, k, v, step, state,
        index=index, view=View(c.window), scale=dim**-0.5, sampled_step=sampled_step,
    )  # fmt: skip
    return ops.linear(out, w.out), state


def head(
    ops: Ops, c: RoutedConfig, norm: Norm, w: Linear, residual: Array, step: Step
) -> Array:
    """Logits [S, V] of the sampled tokens."""
    x = ops.rms_norm(ops.take_rows(residual, step.samples), norm, eps=c.norm_eps)
    return ops.all_gather(ops.linear(x, w), axis="tensor")
