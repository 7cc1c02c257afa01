"""Mixture of experts: routing, expert layers, and their sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from inl.ops.group_route import ExpertBias, check_groups
from inl.ops.moe import LEAST, ExpertLinear
from inl.ops.routed import VOTE, TokenRoutedMlp
from inl_jax.tensors import Array, einsum, upcast
from inl_jax.xla.kernel import kernel


def route(
    logits: Array, *, k: int, kind: str, renormalize: bool
) -> tuple[Array, Array]:
    wide = upcast(logits)
    lost = jnp.isnan(wide)
    ids = best(jnp.where(lost, -jnp.inf, wide), k)
    chosen = jnp.take_along_axis(wide, ids, axis=-1)
    if kind == "softmax_topk":
        shares = jax.nn.softmax(wide, axis=-1)
        weights = jnp.take_along_axis(shares, ids, axis=-1)
    elif kind == "topk_softmax":
        weights = jax.nn.softmax(chosen, axis=-1)
    else:
        weights = jax.nn.sigmoid(chosen)
    if renormalize:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), LEAST)
    return ids, jnp.where(lost.any(-1, keepdims=True), jnp.nan, weights)


def best(scores: Array, k: int) -> Array:
    """Return the indices of the ``k`` highest scores [T, E], ties to the lowest."""
    # XLA sorts -0.0 below 0.0; adding zero makes them one.
    order = jnp.argsort(-(scores + 0.0), axis=-1, stable=True)
    return order[:, :k].astype(jnp.int32)


def group_route(
    logits: Array,
    w: ExpertBias,
    *,
    k: int,
    kind: str,
    groups: int,
    chosen: int,
    best_of: int,
    renormalize: bool,
) -> tuple[Array, Array]:
    tokens, experts = logits.shape
    check_groups(experts, k, groups, chosen, best_of)
    wide = upcast(logits)
    scores = jax.nn.softmax(wide) if kind == "softmax" else jax.nn.sigmoid(wide)
    ranks = scores if w.bias is None else scores + w.bias
    members = jnp.sort(ranks.reshape(tokens, groups, -1), axis=-1)
    kept = best(members[:, :, -best_of:].sum(-1), chosen)[:, :, None]
    inside = (kept == jnp.arange(experts) // (experts // groups)).any(1)
    ids = best(jnp.where(inside, ranks, -jnp.inf), k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), LEAST)
    return ids, weights


def expert_linear(x: Array, ids: Array, w: ExpertLinear) -> Array:
    tokens, k = ids.shape
    rows = jnp.broadcast_to(x, (tokens, k, x.shape[-1])).reshape(tokens * k, -1)
    y = expert_product(rows, ids.reshape(-1), jnp.swapaxes(w.weight, 1, 2))
    return y.reshape(tokens, k, -1).astype(x.dtype)


def expert_product(x: Array, ids: Array, weight: Array) -> Array:
    """Multiply row s of ``x`` [S, K] by ``weight[ids[s]]`` [K, N]: float32 [S, N].

    As many copies of a matrix as there are rows, if these are fewer than the experts;
    otherwise one grouped product of the rows in order of their experts.
    """
    if ids.shape[0] <= weight.shape[0]:
        return einsum("sk,skn->sn", x, weight[ids])
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(ids, length=weight.shape[0]).astype(jnp.int32)
    y = jax.lax.ragged_dot(
        x[order],
        weight,
        sizes,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.zeros_like(y).at[order].set(y, unique_indices=True)


def dense_expert_linear(x: Array, ids: Array, w: ExpertLinear) -> Array:
    """The op ``expert_linear`` by a loop over all experts.

    Computes every expert for every row, so that ``vmap`` and ``grad`` of it work in any
    order: the grouped product of this JAX cannot be batched.
    """
    rows = jnp.broadcast_to(x, (*ids.shape, x.shape[-1]))

    def add(total: Array, expert: tuple[Array, Array]) -> tuple[Array, None]:
        index, weight = expert
        y = einsum("tsk,nk->tsn", rows, weight)
        return total + jnp.where((ids == index)[:, :, None], y, 0), None

    zeros = jnp.zeros((*ids.shape, w.weight.shape[1]), jnp.float32)
    index = jnp.arange(w.weight.shape[0])
    total, _ = jax.lax.scan(add, zeros, (index, w.weight))
    return total.astype(x.dtype)


def combine_experts(y: Array, weights: Array) -> Array:
    return (upcast(y) * weights[:, :, None]).sum(1).astype(y.dtype)


def drop_overflow(ids: Array, weights: Array, *, experts: int, capacity: int) -> Array:
    chosen = (ids[:, :, None] == jnp.arange(experts)).any(1).astype(jnp.int32)
    before = jnp.cumsum(chosen, axis=0) - chosen
    fits = jnp.take_along_axis(before, ids, axis=-1) < capacity
    remaining = jnp.where(fits, weights, 0)
    return remaining / jnp.maximum(remaining.sum(-1, keepdims=True), LEAST)


def load_balance_loss(logits: Array, *, k: int) -> Any:
    wide, count = upcast(logits), logits.shape[-1]
    choices = jnp.bincount(best(wide, k).reshape(-1), length=count)
    share = choices / logits.shape[0]
    return count / k * (share * jax.nn.softmax(wide, axis=-1).mean(0)).sum()


def token_routed_mlp(x: Array, tokens: Array, mu: Array, w: TokenRoutedMlp) -> Array:
    count = w.gate_up.shape[0]
    chosen = tokens % count if w.experts is None else w.experts[tokens]
    if w.router is not None:
        votes = VOTE * jax.nn.one_hot(chosen, count)
        chosen = jnp.argmax(votes + einsum("th,eh->te", mu, w.router), axis=-1)
    inner = expert_product(x, chosen, w.gate_up).astype(x.dtype)
    gate, up = jnp.split(upcast(inner), 2, axis=-1)
    active = (jax.nn.silu(gate) * up).astype(x.dtype)
    return expert_product(active, chosen, w.down).astype(x.dtype)


KERNELS = tuple(
    kernel(run)
    for run in (
        route, expert_linear, combine_experts, drop_overflow, load_balance_loss,
        token_routed_mlp, group_route,
    )
)  # fmt: skip
