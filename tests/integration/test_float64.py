"""Functions of float64 arrays are float64 throughout, on every framework."""

from __future__ import annotations

import numpy as np
import pytest

import inl
from inl.functional import moe
from inl.kernels import (
    apply_rope,
    block_sparse_matmul,
    flash_attention,
    gemm,
    layer_norm,
)
from inl.spec.kernel import Kernel

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

RNG = np.random.default_rng(7)
T, E, H, INNER = 24, 4, 8, 6
X, LOGITS = RNG.standard_normal((T, H)), RNG.standard_normal((T, E))
GATE, UP = RNG.standard_normal((2, E, INNER, H))
DOWN = RNG.standard_normal((E, H, INNER))
PLAIN = RNG.standard_normal((E, 5, H))
IDS = np.argsort(-LOGITS, 1)[:, :2].astype(np.int32)
WEIGHTS = np.take_along_axis(LOGITS, IDS, 1)
Q, K, V = RNG.standard_normal((3, 2, T, H))
BLOCKS = RNG.standard_normal((2, 4, 4))
COS, SIN = np.cos(RNG.standard_normal((2, T, H // 2)))
CONTROL = RNG.standard_normal((T, 3 * H))


def silu(x):
    return x / (1 + np.exp(-x))


def mixed(ids, weights, apply):
    return np.stack([
        sum(w * apply(i, row) for i, w in zip(chosen, share, strict=True))
        for row, chosen, share in zip(X, ids, weights, strict=True)
    ])  # fmt: skip


def gated(i, row):
    return DOWN[i] @ (silu(GATE[i] @ row) * (UP[i] @ row))


def softmax(x):
    odds = np.exp(x - x.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


ODDS = np.take_along_axis(softmax(LOGITS), IDS, 1)
SHARES = ODDS / ODDS.sum(-1, keepdims=True)
CHOSEN = np.eye(E)[LOGITS.argmax(1)].mean(0)
MATRIX = np.zeros((H, H))
MATRIX[:4, 4:], MATRIX[4:, :4] = BLOCKS
A, B = X[:, : H // 2], X[:, H // 2 :]
CENTERED = X - X.mean(-1, keepdims=True)
CASES = {
    "experts": (
        lambda m: moe.experts(m(X), m(IDS), m(WEIGHTS), (m(GATE), m(UP), m(DOWN))),
        mixed(IDS, WEIGHTS, gated),
    ),
    "few experts": (
        lambda m: moe.experts(m(X[:1]), m(IDS[:1]), m(WEIGHTS[:1]),
                              (m(GATE), m(UP), m(DOWN))),
        mixed(IDS, WEIGHTS, gated)[:1],
    ),
    "plain experts": (
        lambda m: moe.experts(m(X), m(IDS), m(WEIGHTS), m(PLAIN)),
        mixed(IDS, WEIGHTS, lambda i, row: PLAIN[i] @ row),
    ),
    "moe_dispatch": (
        lambda m: moe.moe_dispatch(m(X), m(LOGITS), (m(GATE), m(UP), m(DOWN)),
                                   capacity_factor=4.0),
        mixed(IDS, SHARES, gated),
    ),
    "route": (lambda m: moe.route(m(LOGITS), k=2).weights, SHARES),
    "load_balance_loss": (
        lambda m: moe.load_balance_loss(m(LOGITS)),
        E * (CHOSEN * softmax(LOGITS).mean(0)).sum(),
    ),
    "gemm": (lambda m: gemm(m(X), m(LOGITS.T[:, :H].T)), X @ LOGITS[:H]),
    "layer_norm": (
        lambda m: layer_norm(m(X)),
        CENTERED / np.sqrt((CENTERED**2).mean(-1, keepdims=True) + 1e-5),
    ),
    "attention": (
        lambda m: flash_attention(m(Q), m(K), m(V), block_size=8),
        softmax(Q @ K.swapaxes(1, 2) / np.sqrt(H)) @ V,
    ),
    "rope": (
        lambda m: apply_rope(m(X), m(COS), m(SIN)),
        np.concatenate([A * COS - B * SIN, B * COS + A * SIN], -1),
    ),
    "block_sparse": (
        lambda m: block_sparse_matmul(m(X), m(BLOCKS), [[0, 1], [1, 0]], columns=H),
        X @ MATRIX,
    ),
    "dynamics": (
        lambda m: inl.inl_dynamics(m(X), m(-X), 0.3, 0.9, 0.2, 0.5, 0.1)[0],
        X + 0.05 * (-0.9 * X - 0.2 * (X - 0.3)),
    ),
}  # fmt: skip
MAKE = {"numpy": np.asarray, "torch": torch.asarray, "jax": jax.numpy.asarray}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("name", CASES)
def test_no_step_is_narrower(name, kind):
    run, exact = CASES[name]
    with jax.enable_x64(True):
        found = run(MAKE[kind])
        assert str(found.dtype).rpartition(".")[2] == "float64"
        error = np.abs(np.asarray(found) - exact).max() / np.abs(exact).max()
    assert error < 2e-14


def test_derivatives_of_experts_are_as_precise():
    def loss(x, gate, up, down):
        ids, weights = jax.numpy.asarray(IDS), jax.numpy.asarray(WEIGHTS)
        return moe.experts(x, ids, weights, (gate, up, down)).sum()

    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x) for x in (X, GATE, UP, DOWN)]
        found = jax.grad(loss, (0, 1, 2, 3))(*given)
    tensors = [torch.tensor(x, requires_grad=True) for x in (X, GATE, UP, DOWN)]
    total = 0
    for row, chosen, share in zip(tensors[0], IDS, WEIGHTS, strict=True):
        for i, weight in zip(chosen, share, strict=True):
            inner = torch.nn.functional.silu(tensors[1][i] @ row)
            total = (
                total + weight * (tensors[3][i] @ (inner * (tensors[2][i] @ row))).sum()
            )
    exact = torch.autograd.grad(total, tensors)
    for each, right in zip(found, exact, strict=True):
        error = np.abs(np.asarray(each) - right.numpy()).max()
        assert error < 1e-13 * float(right.abs().max())


def test_products_of_xla_accumulate_in_the_width_of_their_operands():
    """Also those that only models call, whose dtypes are narrower today."""
    from inl.ops.linear import Linear
    from inl_jax.xla import KERNELS

    (linear,) = (each for each in KERNELS if each.op == "linear")
    assert isinstance(linear, Kernel)
    weight = RNG.standard_normal((5, H))
    with jax.enable_x64(True):
        x, w = jax.numpy.asarray(X), jax.numpy.asarray(weight)
        found = np.asarray(linear.run(x, Linear(w, None)))
    assert np.abs(found - X @ weight.T).max() < 1e-14
