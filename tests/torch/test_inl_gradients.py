"""Gradients of INL ops on torch, against differences of the float64 bodies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl import (
    get_backend,
    inl_dynamics,
    inl_dynamics_n_steps,
    inl_dynamics_step,
    set_backend,
)
from inl.errors import RequestError
from inl.ops import catalog
from inl.ops.inl import InlBlock
from inl.ops.inl_functions import inl_dynamics_backward
from inl.spec.tolerance import BodyOps
from inl_torch.dynamics import InlDynamics
from inl_torch.functional import inl_block

BOUND = 1e-6
NAMES = ("x", "v", "mu", "alpha", "beta", "gate", "dt")
BODY = {name: spec.body for name, spec in catalog().items()}


def off(found, want):
    return np.abs(found - want).max() / max(np.abs(want).max(), 1e-3)


def leaves_of(operands):
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in operands]


def gradients(function, operands, weights):
    """Gradients of a weighted sum by autograd."""
    held = leaves_of(operands)
    results = function(*held)
    total = sum(
        (torch.tensor(w) * r).sum() for w, r in zip(weights, results, strict=True)
    )
    found = torch.autograd.grad(total, held, allow_unused=True)
    return [
        np.zeros(x.shape) if g is None else g.numpy()
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
        lambda *given: inl_dynamics(*given[:-1], given[-1] * 1.0001), operands, weights
    )
    assert max(map(off, found, want)) > BOUND


def test_reference_of_the_gradients(dynamics_operands, measured_gradients):
    (*operands, dt), weights = dynamics_operands
    want = measured_gradients(body, (*operands, dt), weights)
    found = inl_dynamics_backward(*weights, *operands, dt=float(dt))
    for name, got, exact in zip(found._fields, found, want, strict=True):
        assert np.shape(got) == exact.shape
        assert off(got, exact) < BOUND, name


def test_controlled(controlled_operands, measured_gradients):
    operands, weights, attrs = controlled_operands

    def plain(x, v, mu, controller, dt):
        return BODY["inl_dynamics_n_steps"](x, v, mu, controller, dt=float(dt), **attrs)

    def ours(x, v, mu, controller, dt):
        if attrs["n_steps"] == 1:
            rest = {key: attrs[key] for key in ("most_beta", "limit")}
            return inl_dynamics_step(x, v, mu, controller, dt, **rest)
        return inl_dynamics_n_steps(x, v, mu, controller, dt=dt, **attrs)

    want = measured_gradients(plain, operands, weights)
    found = gradients(ours, operands, weights)
    for name, got, exact in zip(
        ("x", "v", "mu", "controller", "dt"), found, want, strict=True
    ):
        assert off(got, exact) < BOUND, name


def test_the_clamps_are_active(controlled_operands):
    """Otherwise the gradients of the clamps would not be tested."""
    operands, _, attrs = controlled_operands
    if attrs["limit"] is None:
        return
    *tensors, dt = operands
    _, v = BODY["inl_dynamics_n_steps"](*tensors, dt=float(dt), **attrs)
    held = np.abs(v) == attrs["limit"]
    assert 0 < held.sum() < held.size
    beta = np.log1p(np.exp(operands[3][..., 5:10]))
    assert 0 < (beta > attrs["most_beta"]).sum() < beta.size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype):
    rng = torch.Generator().manual_seed(3)
    operands = [torch.randn((4, 9), generator=rng).to(dtype) for _ in range(6)]
    x, v = inl_dynamics(*operands, 0.1)
    wide_x, wide_v = inl_dynamics(*(each.float() for each in operands), 0.1)
    assert x.dtype == v.dtype == dtype
    assert torch.equal(x, wide_x.to(dtype))
    assert torch.equal(v, wide_v.to(dtype))


def test_a_training_step_moves_every_parameter():
    torch.manual_seed(0)
    layer = InlDynamics(12, controller=8)
    h = torch.randn(2, 5, 12, requires_grad=True)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    first, velocity, _ = layer(h)
    second, velocity, mu = layer(first, velocity)
    loss = second.square().mean() + velocity.square().mean() + mu.square().mean()
    loss.backward()
    optimizer.step()
    assert set(before) == {
        "mu", "mu_proj.weight", "controller_in.weight", "controller_in.bias",
        "controller_out.weight", "controller_out.bias",
    }  # fmt: skip
    for name, p in layer.named_parameters():
        assert not torch.equal(p, before[name]), name
    assert h.grad.abs().min() > 0


def test_the_layer_is_the_models_block():
    torch.manual_seed(1)
    layer = InlDynamics(12, controller=8).double()
    torch.nn.init.normal_(layer.mu)
    h, velocity = torch.randn(2, 7, 12, dtype=torch.float64)
    spec = catalog()["inl_block"]
    state = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    w = spec.weights(
        mu=state["mu"],
        inner=state["controller_in.weight"],
        inner_bias=state["controller_in.bias"],
        outer=state["controller_out.weight"],
        outer_bias=state["controller_out.bias"],
        context=state["mu_proj.weight"],
    )
    from inl.spec.tolerance import BodyOps

    plain = BodyOps(lambda _spec, result: result)
    want = plain.inl_block(h.numpy(), 30 * velocity.numpy(), w, dt=0.1)
    for got, exact in zip(layer(h, 30 * velocity), want, strict=True):
        assert off(got.detach().numpy(), exact) < 1e-12


@pytest.fixture
def auto():
    yield
    set_backend("auto")


def test_set_backend_returns_the_original_framework(auto):
    x = torch.full((2, 3), 1.5, dtype=torch.bfloat16)
    want = inl_dynamics(x, 0.0, 0.5, 0.9, 0.1, 0.5)
    assert get_backend(x) == "torch"
    set_backend("numpy")
    assert get_backend(x) == get_backend() == "numpy"
    found = inl_dynamics(x, 0.0, 0.5, 0.9, 0.1, 0.5)
    for got, exact in zip(found, want, strict=True):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, exact)
    set_backend("torch")
    held = inl_dynamics(np.ones((2, 3), np.float32), 0.0, 0.5, 0.9, 0.1, 0.5)
    assert all(isinstance(each, np.ndarray) for each in held)
    assert held[0].dtype == np.float32


def test_a_gradient_is_not_lost_silently(auto):
    set_backend("numpy")
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RequestError, match="needs a gradient, which is lost"):
        inl_dynamics(x, 0.0, 0.5, 0.9, 0.1, 0.5)


def test_arrays_of_two_frameworks_are_refused():
    with pytest.raises(RequestError, match="found x of torch, mu of numpy"):
        inl_dynamics(torch.ones(3), 0.0, np.ones(3), 0.9, 0.1, 0.5)


def test_results_never_alias_operands():
    x = torch.ones(3)
    moved, velocity = inl_dynamics_n_steps(x, x, 0.0, torch.zeros(9), 0)
    moved += 1
    velocity += 1
    assert torch.equal(x, torch.ones(3))


def test_block(block_operands, measured_gradients):
    operands, weights = block_operands
    bodies = BodyOps(lambda _spec, result: result)

    def plain(h, velocity, dt, *w):
        return bodies.inl_block(h, velocity, InlBlock(*w), dt=float(dt))

    def ours(h, velocity, dt, *w):
        return inl_block(h, velocity, InlBlock(*w), dt=dt)

    _, velocity, _ = plain(*operands)
    assert 0 < (np.abs(velocity) == 10).sum() < velocity.size
    want = measured_gradients(plain, operands, weights)
    found = gradients(ours, operands, weights)
    names = "h", "velocity", "dt", *InlBlock._fields
    for name, got, exact in zip(names, found, want, strict=False):
        assert off(got, exact) < BOUND, name


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_results_without_gradients(dynamics_operands, kind):
    operands, _ = dynamics_operands
    held = [torch.tensor(each).to(getattr(torch, kind)) for each in operands[:6]]
    x, v, *rest = (each.double().numpy() for each in held)
    exact = x, v
    for _ in range(3):
        exact = BODY["inl_dynamics"](*exact, *rest, dt=0.3)
    with torch.no_grad():
        found = held[:2]
        for _ in range(3):
            found = inl_dynamics(*found, *held[2:], 0.3)
    bound = 1e-5 if kind == "float32" else 1e-13
    for got, true in zip(found, exact, strict=True):
        assert got.dtype == held[0].dtype
        assert off(got.double().numpy(), true) < bound
