"""Mixture of experts: routing, expert layers, and their sums."""

from __future__ import annotations

import numpy as np

from inl.ops.group_route import ExpertBias, check_groups
from inl.ops.moe import LEAST, ExpertLinear
from inl.ops.routed import VOTE, TokenRoutedMlp
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel


def route(
    logits: Value, *, k: int, kind: str, renormalize: bool
) -> tuple[Value, Value]:
    wide = fn.upcast(logits)
    lost = fn.isnan(wide)
    ids = fn.top(fn.where(lost, -np.inf, wide), k)
    chosen = fn.take_along(wide, ids)
    if kind == "softmax_topk":
        weights = fn.take_along(fn.softmax(wide), ids)
    elif kind == "topk_softmax":
        weights = fn.softmax(chosen)
    else:
        weights = fn.sigmoid(chosen)
    if renormalize:
        weights = weights / fn.maximum(fn.sum_of(weights, keepdims=True), LEAST)
    return ids, fn.where(fn.any_of(lost, keepdims=True), np.nan, weights)


def group_route(
    logits: Value,
    w: ExpertBias,
    *,
    k: int,
    kind: str,
    groups: int,
    chosen: int,
    best_of: int,
    renormalize: bool,
) -> tuple[Value, Value]:
    tokens, experts = logits.shape
    check_groups(experts, k, groups, chosen, best_of)
    wide = fn.upcast(logits)
    scores = fn.softmax(wide) if kind == "softmax" else fn.sigmoid(wide)
    ranks = scores if w.bias is None else scores + fn.upcast(w.bias)
    members = ranks.reshape(tokens * groups, -1)
    highest = fn.take_along(members, fn.top(members, best_of))
    kept = fn.top(fn.sum_of(highest).reshape(tokens, groups), chosen)
    owner = fn.arange(kept, experts) // (experts // groups)
    inside = fn.any_of(fn.transpose(kept[:, :, None].equal(owner), 0, 2, 1))
    ids = fn.top(fn.where(inside, ranks, -np.inf), k)
    weights = fn.take_along(scores, ids)
    if renormalize:
        weights = weights / fn.maximum(fn.sum_of(weights, keepdims=True), LEAST)
    return ids, weights


def expert_linear(x: Value, ids: Value, w: ExpertLinear) -> Value:
    tokens, k = ids.shape
    rows = fn.broadcast_to(x, (tokens, k, x.shape[-1])).reshape(tokens * k, -1)
    y = expert_product(rows, ids.reshape(-1), fn.transpose(w.weight, 0, 2, 1))
    return y.reshape(tokens, k, -1)


def expert_product(x: Value, ids: Value, weight: Value) -> Value:
    """Multiply row s of ``x`` [S, K] by ``weight[ids[s]]`` [K, N]: [S, N].

    As many copies of a matrix as there are rows, if these are fewer than the experts;
    otherwise every row by every expert, of which one is kept.
    """
    if ids.shape[0] <= weight.shape[0]:
        return fn.matmul(x[:, None], fn.take(weight, ids))[:, 0]
    result = fn.full(x, (x.shape[0], weight.shape[2]), 0, x.dtype)
    for expert in range(weight.shape[0]):
        chosen = ids.equal(expert)[:, None]
        result = fn.where(chosen, fn.matmul(x, weight[expert]), result)
    return result


def combine_experts(y: Value, weights: Value) -> Value:
    return fn.sum_of(fn.upcast(y) * weights[:, :, None], 1).astype(y.dtype)


def drop_overflow(ids: Value, weights: Value, *, experts: int, capacity: int) -> Value:
    chosen = fn.sum_of(fn.one_hot(ids, experts, "int32"), 1)
    before = fn.cumsum(chosen, 0) - chosen
    fits = fn.take_along(before, ids) < capacity
    remaining = fn.where(fits, weights, 0)
    return remaining / fn.maximum(fn.sum_of(remaining, keepdims=True), LEAST)


def load_balance_loss(logits: Value, *, k: int) -> Value:
    wide, count = fn.upcast(logits), logits.shape[-1]
    chosen = fn.one_hot(fn.top(wide, k).reshape(-1), count)
    share = fn.mean_of(chosen, 0) * fn.mean_of(fn.softmax(wide), 0)
    return fn.sum_of(share) * float(count)


def token_routed_mlp(x: Value, tokens: Value, mu: Value, w: TokenRoutedMlp) -> Value:
    count = w.gate_up.shape[0]
    chosen = tokens % count if w.experts is None else fn.take(w.experts, tokens)
    if w.router is not None:
        scores = fn.matmul(fn.upcast(mu), fn.transpose(fn.upcast(w.router), 1, 0))
        chosen = fn.argmax(fn.one_hot(chosen, count) * VOTE + scores)
    gate, up = fn.split(fn.upcast(expert_product(x, chosen, w.gate_up)), 2)
    active = (fn.silu(gate) * up).astype(x.dtype)
    return expert_product(active, chosen, w.down)


KERNELS = tuple(
    kernel(run)
    for run in (
        route, group_route, expert_linear, combine_experts, drop_overflow,
        load_balance_loss, token_routed_mlp,
    )
)  # fmt: skip
