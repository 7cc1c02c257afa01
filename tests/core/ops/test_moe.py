"""Mixture-of-experts ops against loops over tokens and slots, and their errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inl.errors import RequestError
from inl.ops import catalog
from inl.ops.moe import KINDS, ExpertLinear, Experts
from inl.ops.moe_cases import choice, matrices
from inl.ops.moe_dispatch import capacity_of
from inl.spec.op import Spec
from inl.spec.tolerance import BodyOps

OPS = BodyOps(lambda _spec, result: result)
NAN = math.nan


@pytest.fixture
def rng():
    return np.random.default_rng(31)


def exponentials(row):
    top = max(row)
    return [math.exp(value - top) for value in row]


def routed(row, k, kind, renormalize):
    """One token's experts and weights, by hand."""
    order = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:k]
    if kind == "softmax_topk":
        odds = exponentials(row)
        weights = [odds[expert] / sum(odds) for expert in order]
    elif kind == "topk_softmax":
        odds = exponentials([row[expert] for expert in order])
        weights = [one / sum(odds) for one in odds]
    else:
        weights = [1 / (1 + math.exp(-row[expert])) for expert in order]
    total = sum(weights) if renormalize else 1
    return order, [weight / total for weight in weights]


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "k"), [(4, 1), (8, 2), (5, 5)])
def test_route(experts, k, kind, renormalize, rng):
    logits = 2 * rng.standard_normal((9, experts))
    ids, weights = OPS.route(logits, k=k, kind=kind, renormalize=renormalize)
    assert ids.dtype == np.int32
    for row, chosen, given in zip(logits, ids, weights, strict=True):
        order, shares = routed(list(row), k, kind, renormalize)
        assert list(chosen) == order
        assert given == pytest.approx(shares, rel=1e-13)


def test_ties_go_to_the_lowest_expert():
    logits = np.array([[0.0, 1, 1, 1], [2, 2, 0, 2], [0.0, -0.0, 0.0, -0.0]])
    ids, _ = OPS.route(logits, k=2, kind="softmax_topk", renormalize=True)
    assert ids.tolist() == [[1, 2], [0, 1], [0, 1]]


def test_experts_are_ranked_where_their_probabilities_are_all_zero():
    """Experts are ranked by logits: the second and third vanish in a softmax."""
    logits = np.array([[-2000.0, 0, -1000, -3000]])
    ids, weights = OPS.route(logits, k=3, kind="softmax_topk", renormalize=True)
    assert ids.tolist() == [[1, 2, 0]]
    assert weights.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_affects_only_its_own_token(kind, rng):
    logits = rng.standard_normal((4, 5))
    expected = OPS.route(logits, k=2, kind=kind, renormalize=True)
    logits[1, 3] = logits[2] = NAN
    ids, weights = OPS.route(logits, k=2, kind=kind, renormalize=True)
    assert np.isnan(weights[1:3]).all()
    assert 3 not in ids[1]
    assert ids[2].tolist() == [0, 1]
    for found, want in zip((ids, weights), expected, strict=True):
        assert np.array_equal(found[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("k", [0, -1, 5, True, 1.0])
def test_k_outside_the_number_of_experts_raises(k):
    sentence = "k: found .*, accepted: 1 to 4, the number of experts"
    attrs = {"k": k, "kind": "softmax_topk", "renormalize": True}
    with pytest.raises(RequestError, match=sentence):
        OPS.route(np.zeros((2, 4)), **attrs)
    with pytest.raises(RequestError, match=sentence):
        catalog()["route"].shapes(Spec((2, 4), "float32"), **attrs)


def test_an_unknown_routing_kind_raises():
    with pytest.raises(RequestError, match=r"kind: found 'hash', accepted: softmax_"):
        OPS.route(np.zeros((2, 4)), k=1, kind="hash", renormalize=True)


@pytest.mark.parametrize("slots", [1, 3])
def test_expert_linear(slots, rng):
    x, weight = rng.standard_normal((5, slots, 7)), rng.standard_normal((4, 6, 7))
    ids = choice(rng, 5, 4, 3)
    found = OPS.expert_linear(x, ids, ExpertLinear(weight))
    assert found.shape == (5, 3, 6)
    for token in range(5):
        for slot in range(3):
            row = x[token, slot if slots > 1 else 0]
            expected = weight[ids[token, slot]] @ row
            assert np.allclose(found[token, slot], expected, atol=1e-13)


def silu(x):
    return x / (1 + np.exp(-x))


def plain_experts(x, ids, weights, w):
    """Token by token, slot by slot."""
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            inner = silu(w.gate[expert] @ row) * (w.up[expert] @ row)
            out[token] += weight * (w.down[expert] @ inner)
    return out


def test_experts(rng):
    x, ids, w = rng.standard_normal((6, 8)), choice(rng, 6, 5, 2), experts_of(rng, 5)
    weights = rng.standard_normal((6, 2))
    found = OPS.experts(x, ids, weights, w, activation="silu")
    assert np.allclose(found, plain_experts(x, ids, weights, w), atol=1e-12)


def experts_of(rng, count):
    return Experts(*matrices(rng, count, 10, 8))


def test_sigmoid_gate(rng):
    x, gate = rng.standard_normal((3, 4)), np.array([[-5.0], [0], [40]])
    found = OPS.sigmoid_gate(x, gate)
    assert np.allclose(found, x / (1 + np.exp(-gate)), rtol=1e-12)


def plain_drop(ids, weights, capacity):
    taken, kept = {}, np.zeros_like(weights)
    for token, row in enumerate(ids):
        for slot, expert in enumerate(row):
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] <= capacity:
                kept[token, slot] = weights[token, slot]
        if kept[token].any():
            kept[token] /= math.fsum(kept[token])
    return kept


@pytest.mark.parametrize("capacity", [0, 1, 3, 40])
def test_drop_overflow(capacity, rng):
    ids, weights = choice(rng, 20, 5, 2), rng.random((20, 2))
    found = OPS.drop_overflow(ids, weights, experts=5, capacity=capacity)
    assert np.allclose(found, plain_drop(ids, weights, capacity), rtol=1e-13)
    assert (found == 0).any() == (capacity < 20)


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.3, 8.0])
def test_moe_dispatch(factor, rng):
    x, logits = rng.standard_normal((30, 8)), rng.standard_normal((30, 5))
    w = experts_of(rng, 5)
    found = OPS.moe_dispatch(
        x, logits, w, k=2, capacity_factor=factor, kind="softmax_topk",
        activation="silu",
    )  # fmt: skip
    ids, weights = OPS.route(logits, k=2, kind="softmax_topk", renormalize=True)
    kept = plain_drop(ids, weights, math.floor(30 * factor * 2 / 5))
    assert np.allclose(found, plain_experts(x, ids, kept, w), atol=1e-12)
    lost = ~kept.any(1)
    assert lost.any() == (factor == 0.25)
    assert not found[lost].any()


def test_enough_capacity_drops_nothing(rng):
    x, logits, w = rng.standard_normal((12, 8)), np.zeros((12, 4)), experts_of(rng, 4)
    logits[:, 2] = 1
    ids, weights = OPS.route(logits, k=2, kind="softmax_topk", renormalize=True)
    attrs = {"k": 2, "kind": "softmax_topk", "activation": "silu"}
    found = OPS.moe_dispatch(x, logits, w, capacity_factor=2.0, **attrs)
    expected = OPS.experts(x, ids, weights, w, activation="silu")
    assert np.allclose(found, expected, rtol=1e-13)
    fewer = OPS.moe_dispatch(x, logits, w, capacity_factor=1.9, **attrs)
    assert not fewer[-1].any()
    assert np.allclose(fewer[:-1], expected[:-1], rtol=1e-13)


def test_capacity():
    assert capacity_of(30, 5, 2, 1.3) == 15
    assert capacity_of(3, 8, 2, 1.0) == 0
    for factor in (0, -1.0, NAN, math.inf, True):
        with pytest.raises(RequestError, match=r"capacity_factor: found .* above 0"):
            capacity_of(30, 5, 2, factor)


@pytest.mark.parametrize("k", [1, 2])
def test_load_balance_loss(k, rng):
    logits = rng.standard_normal((11, 4))
    share, odds = [0.0] * 4, [0.0] * 4
    for row in logits:
        order, _ = routed(list(row), k, "softmax_topk", False)
        for expert in order:
            share[expert] += 1 / (11 * k)
        for expert, one in enumerate(exponentials(row)):
            odds[expert] += one / sum(exponentials(row)) / 11
    expected = 4 * math.fsum(f * p for f, p in zip(share, odds, strict=True))
    assert OPS.load_balance_loss(logits, k=k) == pytest.approx(expected, rel=1e-13)


def test_load_balance_loss_is_between_1_and_the_number_of_experts():
    even = 50 * np.eye(4)
    assert OPS.load_balance_loss(even, k=1) == pytest.approx(1)
    assert OPS.load_balance_loss(np.tile(even[:1], (7, 1)), k=1) == pytest.approx(4)
