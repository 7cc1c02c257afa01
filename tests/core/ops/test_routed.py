"""Token-routed experts, one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.routed import TokenRoutedMlp, chosen_experts

BODY = catalog()["token_routed_mlp"].body


@pytest.fixture
def rng():
    return np.random.default_rng(8)


def layer(rng, experts=3, hidden=5, inner=4):
    gate_up = rng.standard_normal((experts, hidden, 2 * inner))
    return TokenRoutedMlp(gate_up, rng.standard_normal((experts, inner, hidden)))


def test_each_token_uses_the_expert_of_its_id(rng):
    w, x = layer(rng), rng.standard_normal((7, 5))
    tokens = np.array([0, 4, 5, 8, 3, 1, 1])
    found = BODY(x, tokens, x, w)
    for row, token in enumerate(tokens):
        both = x[row] @ w.gate_up[token % 3]
        gate, up = both[:4], both[4:]
        want = (gate / (1 + np.exp(-gate)) * up) @ w.down[token % 3]
        assert np.allclose(found[row], want, rtol=1e-12)


def test_experts_come_from_the_table(rng):
    w = layer(rng)._replace(experts=np.array([2, 0, 1, 2], np.int32))
    tokens = np.array([3, 1, 0, 2])
    assert chosen_experts(tokens, None, w).tolist() == [2, 0, 2, 1]


def test_a_router_overrides_above_the_vote(rng):
    router = np.array([[0.0], [1.0], [0.0]])
    w = layer(rng, hidden=1)._replace(router=router)
    mu = np.array([[9.9], [10.1], [-50.0], [10.0]])
    tokens = np.zeros(4, int)
    # Ties go to the lowest expert.
    assert chosen_experts(tokens, mu, w).tolist() == [0, 1, 0, 0]
