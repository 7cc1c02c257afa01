"""``inl.functional.moe`` on NumPy arrays, and its errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inl.errors import RequestError
from inl.functional import moe
from inl.ops.moe_cases import matrices


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def silu(x):
    return x / (1 + np.exp(-x))


def expected_dispatch(x, logits, weights, k, factor):
    """Token by token."""
    gate, up, down = weights
    room = math.floor(len(x) * factor * k / logits.shape[1])
    taken, out = dict.fromkeys(range(logits.shape[1]), 0), np.zeros_like(x)
    for token, row in enumerate(logits):
        kept = {}
        for expert in np.argsort(-row, kind="stable")[:k]:
            if taken[expert] < room:
                kept[expert] = math.exp(row[expert])
            taken[expert] += 1
        for expert, odds in kept.items():
            inner = silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
            out[token] += odds / sum(kept.values()) * (down[expert] @ inner)
    return out


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
def test_moe_dispatch(dtype, factor, rng):
    x, logits = rng.standard_normal((20, 8)), rng.standard_normal((20, 5))
    weights = matrices(rng, 5, 6, 8)
    given = [a.astype(dtype) for a in (x, logits, *weights)]
    found = moe.moe_dispatch(*given[:2], tuple(given[2:]), k=2, capacity_factor=factor)
    assert found.dtype == dtype
    wide = [a.astype("float64") for a in given]
    wanted = expected_dispatch(*wide[:2], wide[2:], 2, factor)
    bound = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3}[dtype]
    assert np.abs(found - wanted).max() < bound * np.abs(wanted).max()


def test_plain_matrices_as_experts(rng):
    x, logits = rng.standard_normal((7, 8)), rng.standard_normal((7, 3))
    weight = rng.standard_normal((3, 4, 8))
    found = moe.moe_dispatch(x, logits, weight, k=1, capacity_factor=3.0)
    wanted = [weight[best] @ row for row, best in zip(x, logits.argmax(1), strict=True)]
    assert np.allclose(found, wanted, atol=1e-12)


def test_moe_dispatch_equals_its_steps(rng):
    x, logits = rng.standard_normal((20, 8)), rng.standard_normal((20, 5))
    weights = matrices(rng, 5, 6, 8)
    sent = moe.capacity(moe.route(logits, k=2), 5, capacity_factor=0.5)
    assert (sent.weights == 0).any()
    found = moe.experts(x, sent.ids, sent.weights, weights)
    whole = moe.moe_dispatch(x, logits, weights, capacity_factor=0.5)
    assert np.array_equal(found, whole)


def test_load_balance_loss(rng):
    assert moe.load_balance_loss(np.zeros((6, 4), np.float32), k=4) == 1
    one = np.tile([9.0, 0, 0, 0], (6, 1))
    assert 3.9 < moe.load_balance_loss(one) < 4


GATE, DOWN = np.ones((3, 4, 8)), np.ones((3, 8, 4))
X, LOGITS = np.ones((5, 8)), np.zeros((5, 3))
NAN = np.where(np.arange(15).reshape(5, 3) == 10, np.nan, 0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: moe.route(LOGITS, k=4), r"k: found 4, accepted: 1 to 3, the number"),
        (lambda: moe.route(NAN, k=1), r"router_logits: found NaN in row 3"),
        (lambda: moe.load_balance_loss(NAN), r"router_logits: found NaN in row 3"),
        (lambda: moe.load_balance_loss(LOGITS, k=9), r"k: found 9"),
        (lambda: moe.route(LOGITS[0], k=1), r"found \[3\], accepted: \[tokens, exp"),
        (lambda: moe.route(LOGITS[:0], k=1), r"found \[0, 3\]"),
        (lambda: dispatch(logits=NAN), r"found NaN in row 3"),
        (lambda: dispatch(k=4), r"k: found 4"),
        (lambda: dispatch(capacity_factor=0), r"capacity_factor: found 0, accepted"),
        (lambda: dispatch(capacity_factor=-1.0), r"capacity_factor: found -1"),
        (lambda: dispatch(capacity_factor=np.nan), r"capacity_factor: found nan"),
        (lambda: dispatch(logits=LOGITS[:4]), r"\[4, 3\], accepted: \[5, 3\]"),
        (lambda: dispatch(weights=(GATE, GATE)), r"found \[3, 4, 8\], \[3, 4, 8\] for"),
        (lambda: dispatch(weights=(GATE, GATE, GATE)), r"accepted: gate and up \[E"),
        (
            lambda: dispatch(weights=(GATE, GATE[:2], DOWN)),
            r"found \[3, 4, 8\], \[2, 4",
        ),
        (lambda: dispatch(weights=()), r"expert_weights: found  for inputs \[5, 8\]"),
        (lambda: dispatch(weights=GATE[0]), r"found \[4, 8\]"),
        (lambda: dispatch(x=X[:, :7]), r"for inputs \[5, 7\]"),
        (lambda: dispatch(activation="relu"), r"found 'relu', accepted: silu, gelu"),
        (lambda: dispatch(kind="hash"), r"kind: found 'hash'"),
        (lambda: send(ids=[[3]] * 5), r"an id is outside 0 to 2"),
        (lambda: send(ids=[[-1]] * 5), r"an id is outside 0 to 2"),
        (lambda: send(ids=[[1]] * 4), r"found ids \[4, 1\] and weights \[5, 1\] for 5"),
    ],
)
def test_bad_moe_arguments_raise(call, sentence):
    with pytest.raises(RequestError, match=sentence):
        call()


def dispatch(*, x=X, logits=LOGITS, weights=(GATE, GATE, DOWN), **attrs):
    return moe.moe_dispatch(x, logits, weights, **attrs)


def send(*, ids):
    ids = np.array(ids, np.int32)
    return moe.experts(X, ids, np.ones((5, 1)), (GATE, GATE, DOWN))
