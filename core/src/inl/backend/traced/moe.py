"""Mixture of experts: routing, expert layers, and their sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from inl.ops.group_route import ExpertBias, check_groups
from inl.ops.moe import LEAST, ExpertLinear
from inl.ops.routed import VOTE, TokenRoutedMlp
from inl.spec.step import Array


def route(
    xp: Any, logits: Array, *, k: int, kind: str, renormalize: bool
) -> tuple[Array, Array]:
    wide = xp.upcast(logits)
    lost = xp.isnan(wide)
    ids = xp.top(xp.where(lost, -np.inf, wide), k)
    chosen = xp.take_along(wide, ids)
    if kind == "softmax_topk":
        weights = xp.take_along(xp.softmax(wide), ids)
    elif kind == "topk_softmax":
        weights = xp.softmax(chosen)
    else:
        weights = xp.sigmoid(chosen)
    if renormalize:
        weights = weights / xp.maximum(xp.sum_of(weights, keepdims=True), LEAST)
    return ids, xp.where(xp.any_of(lost, keepdims=True), np.nan, weights)


def group_route(
    xp: Any,
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
    wide = xp.upcast(logits)
    scores = xp.softmax(wide) if kind == "softmax" else xp.sigmoid(wide)
    ranks = scores if w.bias is None else scores + xp.upcast(w.bias)
    members = ranks.reshape(tokens * groups, -1)
    totals = xp.sum_of(xp.largest(members, best_of)).reshape(tokens, groups)
    kept = xp.top(totals, chosen)[:, :, None]
    owner = xp.arange(kept, experts) // (experts // groups)
    inside = xp.any_of(xp.equal(kept, owner), 1)
    ids = xp.top(xp.where(inside, ranks, -np.inf), k)
    weights = xp.take_along(scores, ids)
    if renormalize:
        weights = weights / xp.maximum(xp.sum_of(weights, keepdims=True), LEAST)
    return ids, weights


def expert_linear(xp: Any, x: Array, ids: Array, w: ExpertLinear) -> Array:
    tokens, k = ids.shape
    rows = xp.broadcast_to(x, (tokens, k, x.shape[-1])).reshape(tokens * k, -1)
    y = xp.expert_product(rows, ids.reshape(-1), xp.transpose(w.weight, 0, 2, 1))
    return y.reshape(tokens, k, -1).astype(x.dtype)


def combine_experts(xp: Any, y: Array, weights: Array) -> Array:
    return xp.sum_of(xp.upcast(y) * weights[:, :, None], 1).astype(y.dtype)


def drop_overflow(
    xp: Any, ids: Array, weights: Array, *, experts: int, capacity: int
) -> Array:
    chosen = xp.sum_of(xp.one_hot(ids, experts, "int32"), 1)
    before = xp.cumsum(chosen, 0) - chosen
    fits = xp.take_along(before, ids) < capacity
    remaining = xp.where(fits, weights, 0)
    return remaining / xp.maximum(xp.sum_of(remaining, keepdims=True), LEAST)


def load_balance_loss(xp: Any, logits: Array, *, k: int) -> Array:
    wide, count = xp.upcast(logits), logits.shape[-1]
    chosen = xp.one_hot(xp.top(wide, k).reshape(-1), count).astype(wide.dtype)
    share = xp.mean_of(chosen, 0) * xp.mean_of(xp.softmax(wide), 0)
    return xp.sum_of(share) * float(count)


def token_routed_mlp(
    xp: Any, x: Array, tokens: Array, mu: Array, w: TokenRoutedMlp
) -> Array:
    count = w.gate_up.shape[0]
    chosen = tokens % count if w.experts is None else xp.take(w.experts, tokens)
    if w.router is not None:
        scores = xp.product(mu, w.router)
        chosen = xp.argmax(xp.one_hot(chosen, count) * VOTE + scores)
    inner = xp.expert_product(x, chosen, w.gate_up).astype(x.dtype)
    gate, up = xp.split(xp.upcast(inner), 2)
    active = (xp.silu(gate) * up).astype(x.dtype)
    return xp.expert_product(active, chosen, w.down).astype(x.dtype)
