"""Triton kernels of routing: a program chooses the experts of one token.

Experts are ranked by 64-bit keys: the bits of the score as an ordered integer, then the
index, the lowest first. Keys are distinct, so that each choice is one maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

TAKEN = tl.constexpr(-(2**63))
"""Less than the key of any score."""


@triton.jit
def rank_keys(scores: tensor, index: tensor) -> tensor:
    """Keys of float32 scores; NaN ranks with minus infinity, and 0.0 with -0.0."""
    scores = tl.where(scores == scores, scores, float("-inf")) + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return ordered * 4294967296 + (0x7FFFFFFF - index)


@triton.jit
def key_index(key: tensor) -> tensor:
    """The index in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def sigmoid(x: tensor) -> tensor:
    """Logistic function, without overflow; 0 where it would be subnormal."""
    share = tl.where(tl.abs(x) > 87, 0.0, tl.exp(-tl.abs(x)))
    return tl.where(x >= 0, 1.0, share) / (1 + share)


@triton.jit
def store_choice(
    ids: tensor, weights: tensor, chosen: tensor, values: tensor, K: tl.constexpr,
    K_P: tl.constexpr, RENORMALIZE: tl.constexpr, LEAST: tl.constexpr,
) -> None:  # fmt: skip
    """Store the experts of the program's token, and their weights."""
    at = tl.arange(0, K_P)
    if RENORMALIZE:
        total = tl.sum(tl.where(at < K, values, 0.0), 0)
        # A comparison keeps a sum that is NaN.
        values = values / tl.where(total < LEAST, LEAST, total)
    place = tl.program_id(0).to(tl.int64) * K + at
    tl.store(ids + place, chosen, mask=at < K)
    tl.store(weights + place, values, mask=at < K)


@triton.jit
def route_row(
    logits: tensor, ids: tensor, weights: tensor, stride: tensor, EXPERTS: tl.constexpr,
    EXPERTS_P: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, KIND: tl.constexpr,
    RENORMALIZE: tl.constexpr, LEAST: tl.constexpr,
) -> None:  # fmt: skip
    """Experts and weights of one token.

    KIND: 0, 1 and 2 are softmax over all experts, over the chosen ones, and sigmoid.
    """
    index = tl.arange(0, EXPERTS_P)
    inside = index < EXPERTS
    row = logits + tl.program_id(0).to(tl.int64) * stride
    scores = tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32)
    invalid = tl.sum((scores != scores).to(tl.int32), 0) > 0
    keys = tl.where(inside, rank_keys(scores, index), TAKEN)
    at = tl.arange(0, K_P)
    chosen = tl.zeros((K_P,), tl.int32)
    values = tl.full((K_P,), float("-inf"), tl.float32)
    for number in range(K):
        key = tl.max(keys, 0)
        best = key_index(key)
        keys = tl.where(keys == key, TAKEN, keys)
        chosen = tl.where(at == number, best, chosen)
        value = tl.sum(tl.where(index == best, scores, 0.0), 0)
        values = tl.where(at == number, value, values)
    if KIND == 0:
        top = tl.max(scores, 0)
        values = tl.exp(values - top) / tl.sum(tl.exp(scores - top), 0)
    elif KIND == 1:
        shares = tl.exp(values - tl.max(values, 0))
        values = shares / tl.sum(shares, 0)
    else:
        values = sigmoid(values)
    values = tl.where(invalid, float("nan"), values)
    store_choice(ids, weights, chosen, values, K, K_P, RENORMALIZE, LEAST)


@triton.jit
def group_route_row(
    logits: tensor, bias: tensor, ids: tensor, weights: tensor, stride: tensor,
    GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, SIZE: tl.constexpr,
    SIZE_P: tl.constexpr, K: tl.constexpr, K_P: tl.constexpr, CHOSEN: tl.constexpr,
    BEST_OF: tl.constexpr, SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr, LEAST: tl.constexpr,
) -> None:  # fmt: skip
    """Experts of one token in the best groups, and weights."""
    group, member = tl.arange(0, GROUPS_P), tl.arange(0, SIZE_P)
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    index = group[:, None] * SIZE + member[None, :]
    row = logits + tl.program_id(0).to(tl.int64) * stride
    scores = tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        shares = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores = shares / tl.sum(tl.sum(shares, 1), 0)
    else:
        scores = sigmoid(scores)
    ranks = scores
    if HAS_BIAS:
        ranks += tl.load(bias + index, mask=inside, other=0)
    keys = tl.where(inside, rank_keys(ranks, index), TAKEN)
    left = keys
    totals = tl.zeros((GROUPS_P,), tl.float32)
    for _ in range(BEST_OF):
        key = tl.max(left, 1)
        is_best = left == key[:, None]
        totals += tl.sum(tl.where(is_best & inside, ranks, 0.0), 1)
        left = tl.where(is_best, TAKEN, left)
    left_groups = tl.where(group < GROUPS, rank_keys(totals, group), TAKEN)
    kept = tl.zeros((GROUPS_P,), tl.int32)
    for _ in range(CHOSEN):
        key = tl.max(left_groups, 0)
        kept = tl.where(left_groups == key, 1, kept)
        left_groups = tl.where(left_groups == key, TAKEN, left_groups)
    keys = tl.where((kept > 0)[:, None], keys, TAKEN)
    at = tl.arange(0, K_P)
    chosen = tl.zeros((K_P,), tl.int32)
    values = tl.zeros((K_P,), tl.float32)
    for number in range(K):
        key = tl.max(tl.max(keys, 1), 0)
        best = key_index(key)
        keys = tl.where(keys == key, TAKEN, keys)
        chosen = tl.where(at == number, best, chosen)
        value = tl.sum(tl.sum(tl.where(index == best, scores, 0.0), 1), 0)
        values = tl.where(at == number, value, values)
    store_choice(ids, weights, chosen, values, K, K_P, RENORMALIZE, LEAST)
