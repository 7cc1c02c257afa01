"""Multi-head latent attention (DeepSeek-V2, 2024) over a cache of latents.

A token's keys and values are products of one latent vector with a matrix per head, and
a rotated part of the key that all heads share. Queries are multiplied with the key
matrices instead, so that the cache has one head: the latent and the rotated key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inl.models import blocks, groups, moe
from inl.ops.heads import HeadLinear
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.spec.cache import State
from inl.spec.step import Array, Step
from inl.spec.weights import Group

if TYPE_CHECKING:
    from inl.ops.protocol import Ops

LATENT_EPS: Final = 1e-6
"""Epsilon of the norms of latents, whatever the config has."""


@dataclass(frozen=True, slots=True)
class MlaConfig(moe.MoeConfig):
    """Sizes and constants of one checkpoint. ``head_dim`` is that of the cache."""

    latent: int = 0
    """Size of the latent of keys and values."""
    query_latent: int = 0
    """Size of the latent of queries; 0 if they have none."""
    plain_dim: int = 0
    """Lanes of a key that do not rotate."""
    rotary_dim: int = 0
    """Lanes of a key that rotate."""
    value_dim: int = 0
    interleaved: bool = True
    """Whether the lanes of a rotating plane are adjacent in the checkpoint."""


class Attention(NamedTuple):
    """Weights of :func:`attention`: groups, replaced by tensors when loaded."""

    norm: Norm | Group
    q_plain: Linear | Group
    q_turned: Linear | Group
    latent: Linear | Group
    latent_norm: Norm | Group
    k_turned: Linear | Group
    keys: HeadLinear | Group
    """[heads * plain_dim, latent]."""
    values: HeadLinear | Group
    """[heads * value_dim, latent]."""
    out: Linear | Group
    q_latent: Linear | Group | None = None
    q_norm: Norm | Group | None = None


def attention_weights(c: MlaConfig, at: str) -> Attention:
    """Return the groups of the layer with name prefix ``at``."""
    own, h = f"{at}self_attn.", c.hidden_size
    turned = [*range(c.rotary_dim)]
    if c.interleaved:
        turned = [*range(0, c.rotary_dim, 2), *range(1, c.rotary_dim, 2)]
    width = c.plain_dim + c.rotary_dim
    from_q = "q_b_proj" if c.query_latent else "q_proj"
    q, kv = f"{own}{from_q}", f"{own}kv_a_proj_with_mqa"
    columns, total = c.query_latent or h, c.heads * width
    stored = c.latent + c.rotary_dim
    of_kv = c.plain_dim + c.value_dim

    def queries(lanes: list[int]) -> Group:
        spans = groups.head_rows(lanes, width, c.heads)
        return Group("linear", weight=groups.rows(f"{q}.weight", spans, total, columns))

    def shared(lanes: list[int]) -> Group:
        spans = groups.head_rows(lanes, stored, 1)
        params = {"weight": groups.rows(f"{kv}.weight", spans, stored, h)}
        if c.qkv_bias:
            params["bias"] = groups.rows(f"{kv}.bias", spans, stored)
        return Group("linear", **params)

    def matrices(first: int, count: int) -> Group:
        spans = groups.head_rows(range(first, first + count), of_kv, c.heads)
        source, rows = f"{own}kv_b_proj.weight", c.heads * of_kv
        return Group("head_linear", weight=groups.rows(source, spans, rows, c.latent))

    found = Attention(
        groups.norm(f"{at}input_layernorm", h),
        queries([*range(c.plain_dim)]),
        queries([c.plain_dim + lane for lane in turned]),
        shared([*range(c.latent)]),
        groups.norm(f"{own}kv_a_layernorm", c.latent),
        shared([c.latent + lane for lane in turned]),
        matrices(0, c.plain_dim),
        matrices(c.plain_dim, c.value_dim),
        groups.linear(f"{own}o_proj", h, c.heads * c.value_dim, bias=c.out_bias),
    )
    if not c.query_latent:
        return found
    return found._replace(
        q_latent=groups.linear(f"{own}q_a_proj", c.query_latent, h, bias=c.qkv_bias),
        q_norm=groups.norm(f"{own}q_a_layernorm", c.query_latent),
    )


class Projected(NamedTuple):
    """What attention is computed from."""

    residual: Array
    """[T, H]."""
    x: Array
    """[T, H]: the layer's normalized input."""
    y: Array
    """[T, query_latent]: the normalized latents of queries; ``x`` if there are none."""
    q: Array
    """[T, heads, latent + rotary_dim]: queries of latents."""
    latent: Array
    """[T, 1, latent + rotary_dim]: key and value of all heads."""


def project(ops: Ops, c: MlaConfig, w: Attention, carry: Any) -> Projected:
    """Project a layer's input; ``carry`` has the rotation of ``rotary_dim`` lanes."""
    residual, x = ops.reduce_add_norm(
        carry.residual, carry.delta, w.norm, eps=c.norm_eps
    )
    y = x
    if w.q_latent is not None and w.q_norm is not None:
        y = ops.rms_norm(ops.linear(x, w.q_latent), w.q_norm, eps=LATENT_EPS)
    q_turned = ops.linear(y, w.q_turned).reshape(y.shape[0], -1, c.rotary_dim)
    k_turned = ops.linear(x, w.k_turned).reshape(x.shape[0], 1, c.rotary_dim)
    q_turned, k_turned = ops.rope(q_turned, k_turned, carry.cos, carry.sin)
    q = ops.linear(y, w.q_plain).reshape(y.shape[0], -1, c.plain_dim)
    q = ops.join_lanes(ops.head_linear(q, w.keys, transposed=True), q_turned)
    latent = ops.rms_norm(ops.linear(x, w.latent), w.latent_norm, eps=LATENT_EPS)
    k = ops.join_lanes(latent.reshape(latent.shape[0], 1, c.latent), k_turned)
    return Projected(residual, x, y, q, k)


def finish(
    ops: Ops, c: MlaConfig, w: Attention, carry: Any, residual: Array, out: Array,
    step: Step, sampled_step: Step | None,
) -> Any:  # fmt: skip
    """Return the carry after attention over latents with the result ``out``."""
    # Values are latents too: of the result, the rotated lanes are not used.
    out = out.reshape(out.shape[0], -1, c.head_dim)[:, :, : c.latent]
    out = ops.head_linear(out, w.values, transposed=False)
    if sampled_step is not None:
        residual = ops.take_rows(residual, step.samples)
    delta = ops.linear(out.reshape(out.shape[0], -1), w.out)
    return carry._replace(residual=residual, delta=delta)


def attention(
    ops: Ops, c: MlaConfig, w: Attention, carry: blocks.Carry, step: Step, state: State,
    *, index: int, sampled_step: Step | None,
) -> tuple[blocks.Carry, State]:  # fmt: skip
    """Attention block; ``carry`` has the rotation tables of ``rotary_dim`` lanes."""
    residual, _, _, q, k = project(ops, c, w, carry)
    out, state = blocks.attend(
        ops, q, k, k, step, state, index=index, view=c.views[index],
        scale=c.attention_scale or 1.0, sampled_step=sampled_step,
    )  # fmt: skip
    return finish(ops, c, w, carry, residual, out, step, sampled_step), state
