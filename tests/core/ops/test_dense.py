"""Products, norms, activations, lookups and writes against loops and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inl.ops import catalog
from inl.ops.embedding import Embedding
from inl.ops.linear import Linear, QkvLinear
from inl.ops.mlp import GatedMlp
from inl.ops.norm import Norm
from inl.spec.cache import Cache
from inl.spec.tolerance import BodyOps

OPS = BodyOps(lambda _spec, result: result)


@pytest.fixture
def rng():
    return np.random.default_rng(8)


def product(x, weight, bias=None):
    out = [
        [math.fsum(a * b for a, b in zip(r, c, strict=True)) for c in weight] for r in x
    ]
    return np.array(out) + (0 if bias is None else bias)


def test_linear(rng):
    x, weight, bias = (rng.standard_normal(s) for s in ((3, 5), (4, 5), (4,)))
    assert np.allclose(OPS.linear(x, Linear(weight)), product(x, weight), atol=1e-14)
    found = OPS.linear(x, Linear(weight, bias))
    assert np.allclose(found, product(x, weight, bias), atol=1e-14)


def test_qkv_linear(rng):
    x = rng.standard_normal((3, 5))
    weights = [rng.standard_normal((n, 5)) for n in (6, 2, 3)]
    biases = [rng.standard_normal(n) for n in (6, 2, 3)]
    for given in (weights, weights + biases):
        found = OPS.qkv_linear(x, QkvLinear(*given))
        for part, weight, bias in zip(
            found, weights, given[3:] or (None,) * 3, strict=True
        ):
            assert np.allclose(part, product(x, weight, bias), atol=1e-14)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rms_norm(rng, size):
    x, weight = size * rng.standard_normal((4, 7)), rng.standard_normal(7)
    found = OPS.rms_norm(x, Norm(weight), eps=1e-5)
    for row, values in zip(found, x, strict=True):
        mean = math.fsum(value * value for value in values) / 7
        expected = [v / math.sqrt(mean + 1e-5) * w for v, w in zip(values, weight)]  # noqa: B905
        assert row == pytest.approx(expected, rel=1e-13)


def test_reduce_add_norm_returns_the_sum_and_its_norm(rng):
    residual, delta = rng.standard_normal((2, 4, 7))
    w = Norm(rng.standard_normal(7))
    total, normed = OPS.reduce_add_norm(residual, delta, w, eps=1e-6)
    assert np.array_equal(total, residual + delta)
    assert np.array_equal(normed, OPS.rms_norm(residual + delta, w, eps=1e-6))


def silu(x):
    return x / (1 + math.exp(-x))


def gelu(x):
    return x * 0.5 * math.erfc(-x / math.sqrt(2))


GATES = [-30.0, -8.0, -1.5, -0.1, 0.0, 0.1, 1.5, 8.0, 30.0]


def test_silu_gate(rng):
    gate, up = np.array(GATES), rng.standard_normal(len(GATES))
    found = OPS.gated_activation(gate, up, activation="silu")
    expected = [silu(g) * u for g, u in zip(GATES, up, strict=True)]
    # 1 + tanh loses precision where the sigmoid vanishes.
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-14)


def test_gelu_gate_is_near_the_exact_gelu(rng):
    up = rng.standard_normal(len(GATES))
    found = OPS.gated_activation(np.array(GATES), up, activation="gelu_tanh")
    expected = [gelu(g) * u for g, u in zip(GATES, up, strict=True)]
    assert np.abs(found - expected).max() < 1e-3 * np.abs(up).max()
    exact = [
        0.5 * g * (1 + math.tanh(0.7978845608028654 * (g + 0.044715 * g**3))) * u
        for g, u in zip(GATES, up, strict=True)
    ]
    assert found == pytest.approx(exact, rel=1e-12, abs=1e-15)


def test_gated_mlp(rng):
    x = rng.standard_normal((2, 3))
    gate, up, down = (rng.standard_normal(s) for s in ((5, 3), (5, 3), (3, 5)))
    inner = np.vectorize(silu)(product(x, gate)) * product(x, up)
    found = OPS.gated_mlp(x, GatedMlp(gate, up, down), activation="silu")
    assert np.allclose(found, product(inner, down), atol=1e-13)


def test_embedding_and_take_rows(rng):
    table = rng.standard_normal((9, 4))
    ids = np.array([8, 0, 3, 3], np.int32)
    rows = [list(table[i]) for i in (8, 0, 3, 3)]
    assert OPS.embedding(ids, Embedding(table)).tolist() == rows
    assert OPS.take_rows(table, ids).tolist() == rows
    assert not OPS.zeros_like(table).any()


def test_write_kv_changes_only_the_given_positions(rng):
    cache = Cache(*rng.standard_normal((2, 5, 4, 2, 3)))
    before = Cache(cache.k.copy(), cache.v.copy())
    k, v = rng.standard_normal((2, 3, 2, 3))
    cells = [7, 16, 4]
    after = OPS.write_kv(k, v, cache, np.array(cells, np.int32))
    for fresh, old, given in zip(after[:2], before[:2], (k, v), strict=True):
        for cell in range(20):
            expected = old[cell // 4, cell % 4]
            if cell in cells:
                expected = given[cells.index(cell)]
            assert np.array_equal(fresh[cell // 4, cell % 4], expected)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_collectives_on_one_rank_are_the_identity(rng, name):
    x = rng.standard_normal((3, 4))
    assert np.array_equal(getattr(OPS, name)(x, axis="tensor"), x)


def test_every_op_has_cases_that_match_its_shapes():
    """``shapes`` maps specs to specs: compared with the results of the body."""
    from inl.spec.op import Spec
    from inl.spec.tree import leaves, tree_map

    primitive = [spec for spec in catalog().values() if not spec.composite]
    for spec in primitive:
        for case in spec.cases(np.random.default_rng(0)):
            args = [
                tree_map(lambda a: Spec(np.shape(a), np.asarray(a).dtype.name), arg)
                for arg in case.args
            ]
            foreseen = list(leaves(spec.shapes(*args, **case.attrs)))
            found = list(leaves(spec.body(*case.args, **case.attrs)))
            shapes = [array.shape for array in found]
            assert [s.shape for s in foreseen] == shapes, case
            kinds = [array.dtype.kind for array in found]
            assert [np.dtype(s.dtype).kind for s in foreseen] == kinds, case
            # A result that is an argument's own spec takes that argument's memory.
            consumed = [spec.parameters.index(name) for name in spec.consumes]
            for at, (arg, value) in enumerate(zip(args, case.args, strict=True)):
                pairs = (
                    []
                    if at in consumed
                    else zip(leaves(arg), leaves(value), strict=True)
                )
                for leaf, array in pairs:
                    for result, computed in zip(foreseen, found, strict=True):
                        same = result is not leaf or np.array_equal(array, computed)
                        assert same, f"{spec.name}: a result replaces an argument"
