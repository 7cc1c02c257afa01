"""One step of tensors of one shape, launched without torch's ops, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import PLACE

from inl import inl_dynamics
from inl.ops.inl_functions import inl_dynamics_backward
from inl_torch.registered import alike, dynamics, formula
from inl_torch.triton.dynamics import alike as launches

SHAPES = ((5,), (1, 1030), (3, 2, 40))
UNITS = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Use the Triton kernels on this device, several rows a program."""
    monkeypatch.setattr(dynamics, "TRITON_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(formula, "one_step", lambda *_: None)
    monkeypatch.setattr(launches, "PROGRAMS", 2)
    launches._backward.cache_clear()
    yield
    launches._backward.cache_clear()


def operands(shape, dtype=torch.float32):
    rng = np.random.default_rng(len(shape))
    made = [torch.from_numpy(rng.standard_normal(shape)) for _ in range(8)]
    return [each.to(PLACE, dtype) for each in made]


def exact(given, dt):
    """New position and velocity, and the gradients of six operands, in float64."""
    *rest, gx, gv = (each.detach().double().cpu().numpy() for each in given)
    x, v, mu, alpha, beta, gate = rest
    velocity = alpha * v - beta * (x - mu)
    found = inl_dynamics_backward(gx, gv, *rest, dt=dt)
    return [x + dt * gate * velocity, velocity, *found[:6]]


def computed(given, dt, call=inl_dynamics):
    leaves = [each.clone().requires_grad_() for each in given[:6]]
    with torch.no_grad():
        plain = call(*leaves, dt)
    results = call(*leaves, dt)
    assert all(map(torch.equal, plain, results))
    return [*results, *torch.autograd.grad(results, leaves, given[6:])]


def errors(found, want):
    return [
        float(np.abs(a.detach().double().cpu().numpy() - b).max() / np.abs(b).max())
        for a, b in zip(found, want, strict=True)
    ]


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(shape, dtype):
    given = operands(shape, dtype)
    assert max(errors(computed(given, 0.3), exact(given, 0.3))) < UNITS[dtype]


def test_a_wrong_step_is_found():
    given = operands((3, 40))
    off = errors(computed(given, 0.303), exact(given, 0.3))
    assert min(off[0], *off[2:4], *off[5:]) > 1e-4


def test_only_the_gradients_that_are_needed():
    *given, gx, gv = operands((3, 40))
    given[3].requires_grad_()
    (found,) = torch.autograd.grad(inl_dynamics(*given, 0.3), given[3], (gx, gv))
    want = exact([*given, gx, gv], 0.3)
    assert errors([found], want[5:6])[0] < 1e-5


def test_second_derivatives_equal_the_formula():
    def curvature(call):
        leaves = [each.clone().requires_grad_() for each in operands((2, 7))[:6]]
        x, v = call(*leaves, 0.3)
        total = (x * x + v * v).sum()
        first = torch.autograd.grad(total, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    def eager(x, v, mu, alpha, beta, gate, dt):
        return formula.steps(x, v, mu, [alpha, beta, gate], dt, 1, None, None)

    for got, want in zip(curvature(inl_dynamics), curvature(eager), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_other_operands_are_left_to_the_op():
    x, v, *rest = operands((4, 6))[:6]
    assert alike.one_step(x, v, *rest, 0.1) is not None
    others = (
        (x, v[:1], *rest, 0.1), (x, v.half(), *rest, 0.1), (x, v, *rest, 1),
        (x, v, 0.5, *rest[1:], 0.1), (x.T.contiguous().T, v, *rest, 0.1),
        (x[:0], v[:0], *(each[:0] for each in rest), 0.1),
    )  # fmt: skip
    for given in others:
        assert alike.one_step(*given) is None
    torch.func.vmap(lambda *g: inl_dynamics(*g, 0.1))(x, v, *rest)
