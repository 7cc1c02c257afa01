"""Ops of single model families, against loops over single numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inl.errors import RequestError
from inl.ops import catalog
from inl.ops.activation import KINDS
from inl.ops.attention import attention_case
from inl.ops.group_route import ExpertBias
from inl.ops.heads import HeadLinear
from inl.ops.norm import LayerNorm
from inl.ops.sink_attention import Sinks


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def body(name):
    return catalog()[name].body


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_is_a_key_with_the_value_zero(window, rng):
    """Every cached key and value gets a lane that only the sink's key differs in."""
    case = attention_case(rng, "mixed", (4, 2, 8), {"window": window})
    q, cache, step = case.args
    sinks = rng.standard_normal(4)
    attrs = {"scale": 0.3, "window": window, "group": 0}
    found = body("sink_attention")(q, cache, step, Sinks(sinks), **attrs)
    plain = body("attention")(q, cache, step, cap=None, **attrs)
    for token in range(int(step.used_counts[2])):
        row, last = step.rows[token], step.positions[token]
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(4):
            total = 0.0
            for at in range(first, last + 1):
                key = cache.k[step.blocks[0, row, at // 4], at % 4, head // 2]
                total += math.exp(0.3 * float(q[token, head] @ key))
            share = total / (total + math.exp(sinks[head]))
            assert found[token, head] == pytest.approx(share * plain[token, head])


def test_layer_norm(rng):
    x, weight, bias = 5 + rng.standard_normal((3, 7)), *rng.standard_normal((2, 7))
    found = body("layer_norm")(x, LayerNorm(weight, bias), eps=0.1)
    for row, given in zip(x.tolist(), found.tolist(), strict=True):
        mean = math.fsum(row) / 7
        spread = math.sqrt(math.fsum((each - mean) ** 2 for each in row) / 7 + 0.1)
        expected = [(row[i] - mean) / spread * weight[i] + bias[i] for i in range(7)]
        assert given == pytest.approx(expected)
    plain = body("layer_norm")(x, LayerNorm(weight), eps=0.1)
    assert plain + bias == pytest.approx(found)


def test_each_head_has_a_matrix(rng):
    x, y = rng.standard_normal((4, 3, 5)), rng.standard_normal((4, 3, 2))
    weight = rng.standard_normal((3 * 2, 5))
    forward = body("head_linear")(x, HeadLinear(weight), transposed=False)
    back = body("head_linear")(y, HeadLinear(weight), transposed=True)
    for head in range(3):
        matrix = weight[2 * head : 2 * head + 2]
        assert forward[:, head] == pytest.approx(x[:, head] @ matrix.T)
        assert back[:, head] == pytest.approx(y[:, head] @ matrix)
    assert np.array_equal(body("join_lanes")(x, y)[:, :, 5:], y)


FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (
        1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_sigmoid": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind, rng):
    x = 3 * rng.standard_normal((4, 9))
    found = body("activate")(x, kind=kind)
    for value, given in zip(x.ravel(), found.ravel(), strict=True):
        assert given == pytest.approx(FORMULAS[kind](float(value)), abs=1e-12)


def test_an_unknown_activation_is_refused():
    with pytest.raises(RequestError, match="found 'swish2', accepted: silu"):
        body("activate")(np.zeros((1, 2)), kind="swish2")


ROUTING = {"k": 3, "groups": 4, "chosen": 2, "renormalize": True}


def routed(row, bias, kind, best_of):
    """One token's experts and weights, with the numbers of ROUTING."""
    scores = [1 / (1 + math.exp(-x)) for x in row]
    if kind == "softmax":
        total = math.fsum(math.exp(x) for x in row)
        scores = [math.exp(x) / total for x in row]
    ranks = [score + shift for score, shift in zip(scores, bias, strict=True)]
    members = [ranks[5 * group : 5 * group + 5] for group in range(4)]
    value = [sum(sorted(group)[-best_of:]) for group in members]
    kept = sorted(range(4), key=lambda group: -value[group])[:2]
    inside = [expert for expert in range(20) if expert // 5 in kept]
    order = sorted(inside, key=lambda expert: -ranks[expert])[:3]
    total = sum(scores[expert] for expert in order)
    return order, [scores[expert] / total for expert in order]


@pytest.mark.parametrize(("kind", "best_of"), [("sigmoid", 2), ("softmax", 1)])
def test_experts_of_the_best_groups(kind, best_of, rng):
    logits, bias = rng.standard_normal((30, 20)), 0.3 * rng.standard_normal(20)
    attrs = ROUTING | {"kind": kind, "best_of": best_of}
    ids, weights = body("group_route")(logits, ExpertBias(bias), **attrs)
    other, _ = body("group_route")(logits, ExpertBias(), **attrs)
    assert (ids != other).any()
    for row, chosen, given in zip(logits.tolist(), ids, weights, strict=True):
        order, shares = routed(row, bias, kind, best_of)
        assert chosen.tolist() == order
        assert given == pytest.approx(shares)


@pytest.mark.parametrize(
    "change", [{"groups": 3}, {"chosen": 5}, {"k": 11}, {"best_of": 6}]
)
def test_groups_that_do_not_fit_are_refused(change):
    attrs = ROUTING | {"kind": "sigmoid", "best_of": 2} | change
    with pytest.raises(RequestError, match="group_route: found"):
        body("group_route")(np.zeros((2, 20)), ExpertBias(), **attrs)
