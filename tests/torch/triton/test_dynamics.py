"""INL dynamics in Triton: gradients against differences of the float64 bodies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_place import DTYPES, PLACE

from inl import inl_dynamics, inl_dynamics_n_steps
from inl.ops import catalog
from inl.ops.inl import InlBlock
from inl.ops.inl_functions import inl_dynamics_backward
from inl.spec.tolerance import BodyOps
from inl_torch import functional
from inl_torch.registered import dynamics, formula

# isort: split
from inl_torch.triton.dynamics import training as dynamics_training

BOUND = 2e-5
"""Of float32, relative to the largest number of a gradient."""

BODY = {name: spec.body for name, spec in catalog().items()}
NAMES = ("x", "v", "mu", "alpha", "beta", "gate", "dt")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Use the Triton kernels on this device, several rows each; check that they ran."""
    runs = []
    plain = dynamics_training.gradients

    def counted(*args):
        runs.append(1)
        return plain(*args)

    monkeypatch.setattr(dynamics, "TRITON_DEVICES", ("cuda", "cpu"))
    # In the interpreter tensors are those of a CPU, which has a formula of its own.
    monkeypatch.setattr(formula, "one_step", lambda *_: None)
    monkeypatch.setattr(dynamics_training, "PROGRAMS", 2)
    monkeypatch.setattr(dynamics_training, "gradients", counted)
    yield
    assert runs, "the gradients were computed elsewhere"


def off(found, want):
    return np.abs(found - want).max() / max(np.abs(want).max(), 1e-3)


def gradients(function, operands, weights, dtype=torch.float32):
    """Gradients of a weighted sum by autograd."""
    held = [
        torch.tensor(np.asarray(x), dtype=dtype, device=PLACE, requires_grad=True)
        for x in operands
    ]
    results = function(*held)
    total = sum(
        (torch.tensor(w, device=PLACE) * r.double()).sum()
        for w, r in zip(weights, results, strict=True)
    )
    found = torch.autograd.grad(total, held, allow_unused=True)
    for g, x in zip(found, held, strict=True):
        assert g is None or (g.shape, g.dtype) == (x.shape, x.dtype)
    return [
        np.zeros(x.shape) if g is None else g.double().cpu().numpy()
        for g, x in zip(found, operands, strict=True)
    ]


def body(x, v, mu, alpha, beta, gate, dt):
    return BODY["inl_dynamics"](x, v, mu, alpha, beta, gate, dt=float(dt))


def test_dynamics(dynamics_operands, measured_gradients):
    operands, weights = dynamics_operands
    want = measured_gradients(body, operands, weights)
    found = gradients(inl_dynamics, operands, weights)
    for name, got, exact in zip(NAMES, found, want, strict=True):
        assert got.shape == exact.shape
        assert off(got, exact) < BOUND, name


def test_a_wrong_gradient_is_found(dynamics_operands, measured_gradients):
    operands, weights = dynamics_operands
    want = measured_gradients(body, operands, weights)
    found = gradients(
        lambda *given: inl_dynamics(*given[:-1], given[-1] * 1.001), operands, weights
    )
    assert max(map(off, found, want)) > BOUND


def test_controlled(controlled_operands, measured_gradients):
    operands, weights, attrs = controlled_operands
    if attrs["n_steps"] > dynamics_training.MAX_STEPS:
        pytest.fail("the fixture has outgrown what is tested here")

    def plain(x, v, mu, controller, dt):
        return BODY["inl_dynamics_n_steps"](x, v, mu, controller, dt=float(dt), **attrs)

    def ours(x, v, mu, controller, dt):
        return inl_dynamics_n_steps(x, v, mu, controller, dt=dt, **attrs)

    want = measured_gradients(plain, operands, weights)
    found = gradients(ours, operands, weights)
    names = ("x", "v", "mu", "controller", "dt")
    for name, got, exact in zip(names, found, want, strict=True):
        assert off(got, exact) < BOUND, name


def test_block(block_operands, measured_gradients):
    operands, weights = block_operands
    bodies = BodyOps(lambda _spec, result: result)

    def plain(h, velocity, dt, *w):
        return bodies.inl_block(h, velocity, InlBlock(*w), dt=float(dt))

    def ours(h, velocity, dt, *w):
        return functional.inl_block(h, velocity, InlBlock(*w), dt=dt)

    want = measured_gradients(plain, operands, weights)
    found = gradients(ours, operands, weights)
    names = "h", "velocity", "dt", *InlBlock._fields
    for name, got, exact in zip(names, found, want, strict=False):
        assert off(got, exact) < BOUND, name


WIDE = {
    "a row, numbers": ((3, 5, 1030), (1030,), (), (), ()),
    "full": ((7, 1030), (7, 1030), (7, 1030), (7, 1), (1, 1030)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WIDE)
def test_wide_rows_equal_the_eager_reference(name, dtype, seed):
    """Rows of more than one program, summed by programs of several rows."""
    rng, dtype = np.random.default_rng(seed), getattr(torch, dtype)
    shape, *others = WIDE[name]
    kept = [torch.tensor(rng.standard_normal(s)).to(dtype) for s in (shape, shape)]
    kept += [torch.tensor(rng.standard_normal(s)).to(dtype) for s in others]
    operands = [each.double().numpy() for each in kept]
    weights = [
        torch.tensor(rng.standard_normal(shape)).to(dtype).double().numpy()
        for _ in range(2)
    ]
    found = gradients(
        lambda *given: inl_dynamics(*given, 0.3), operands, weights, dtype
    )
    want = inl_dynamics_backward(*weights, *operands, dt=0.3)
    bound = BOUND if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for field, got, exact in zip(want._fields, found, want, strict=False):
        assert off(got, exact) < bound, f"{field}, seed {seed}"


@pytest.mark.parametrize("steps", [1, 3])
def test_second_derivatives_equal_the_eager_reference(steps):
    torch.manual_seed(steps)
    held = [torch.randn(s, device=PLACE) for s in ((2, 5), (2, 5), (5,), (2, 15))]

    def curvature(call):
        leaves = [each.clone().requires_grad_() for each in held]
        x, v = call(*leaves)
        total = (x * x + v).sum()
        plain = torch.autograd.grad(total, leaves, retain_graph=True)
        first = torch.autograd.grad(total, leaves, create_graph=True)
        assert all(map(torch.allclose, plain, first))
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    def eager(x, v, mu, controller):
        return formula.steps(x, v, mu, [controller], 0.3, steps, 2.0, 1.5)

    def ours(x, v, mu, controller):
        clamps = {"most_beta": 2.0, "limit": 1.5}
        return inl_dynamics_n_steps(x, v, mu, controller, steps, 0.3, **clamps)

    for got, want in zip(curvature(ours), curvature(eager), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
