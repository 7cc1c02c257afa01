"""INL ops under torch's transforms: second derivatives, compile, export, vmap."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from inl import inl_dynamics, inl_dynamics_n_steps, inl_dynamics_step, moe
from inl_torch.dynamics import InlDynamics

CLAMPS = {"most_beta": 2.0, "limit": 1.5}


@pytest.fixture
def operands():
    torch.manual_seed(0)
    new = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    return [new(2, 3) for _ in range(6)]


@pytest.fixture
def controller():
    torch.manual_seed(1)
    return torch.randn(2, 9, dtype=torch.float64, requires_grad=True)


def curved(pair):
    """A function of the results with second derivatives of its own."""
    x, v = pair
    return x * x + v * v, x * v


def test_second_derivatives_of_dynamics(operands):
    dt = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def call(*given):
        return curved(inl_dynamics(*given))

    assert gradcheck(call, (*operands, dt))
    assert gradgradcheck(call, (*operands, dt))


@pytest.mark.parametrize("n_steps", [1, 3])
def test_second_derivatives_of_controlled_steps(operands, controller, n_steps):
    x, v, mu = operands[:3]

    def call(x, v, mu, controller):
        found = inl_dynamics_n_steps(x, v, mu, controller, n_steps, 0.3, **CLAMPS)
        return curved(found)

    assert gradcheck(call, (x, v, mu, controller))
    assert gradgradcheck(call, (x, v, mu, controller))


def test_second_derivatives_of_the_layer():
    torch.manual_seed(2)
    layer = InlDynamics(3, controller=4).double()
    h = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda h: layer(h)[:2], (h,))


@pytest.mark.parametrize("gated", [False, True])
def test_second_derivatives_of_mixture_of_experts(gated):
    torch.manual_seed(3)
    new = partial(torch.randn, dtype=torch.float64, requires_grad=True)
    x, logits = new(5, 4), new(5, 3)
    w = [new(3, 6, 4), new(3, 6, 4), new(3, 4, 6)] if gated else [new(3, 6, 4)]

    def call(x, logits, *w):
        return moe.moe_dispatch(x, logits, w, k=2, capacity_factor=0.8)

    assert gradcheck(call, (x, logits, *w))
    assert gradgradcheck(call, (x, logits, *w))


def test_second_derivatives_of_the_balance_loss():
    logits = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(lambda logits: moe.load_balance_loss(logits, k=2), (logits,))


def test_one_tensor_as_several_operands(operands):
    x = operands[0]
    assert gradgradcheck(lambda x: curved(inl_dynamics(x, x, x, x, x, x)), (x,))


def test_vmap_and_per_sample_gradients(operands):
    def loss(*given):
        x, v = inl_dynamics(*given)
        return (x * x + v).sum()

    want = torch.autograd.grad(loss(*operands), operands)
    held = [each.detach() for each in operands]
    found = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(6))))(*held)
    for got, exact in zip(found, want, strict=True):
        assert torch.allclose(got, exact, atol=1e-12)
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(*held)
    second = torch.autograd.functional.hessian(lambda x: loss(x, *held[1:]), held[0])
    assert torch.allclose(hessian, second, atol=1e-12)


def test_export(operands):
    class Step(torch.nn.Module):
        def forward(self, x, v, controller):
            return inl_dynamics_step(x, v, 0.1, controller)

    x, v = (each.detach() for each in operands[:2])
    given = (x, v, torch.randn(2, 9, dtype=torch.float64))
    program = torch.export.export(Step(), given).module()
    for got, want in zip(program(*given), Step()(*given), strict=True):
        assert torch.allclose(got, want)


COMPILED = """
import sys, torch
torch.manual_seed(0)
from inl_torch.dynamics import InlDynamics
layer = InlDynamics(4, controller=3)
h = torch.randn(2, 4)
def loss(h):
    a, v, _ = layer(h)
    b, v, _ = layer(a, v)
    return (b * b + v).mean()
compiled = torch.compile(loss, fullgraph=True, backend=sys.argv[1])
found = torch.autograd.grad(compiled(h), list(layer.parameters()))
want = torch.autograd.grad(loss(h), list(layer.parameters()))
assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, want))
import inl
def public(x, v):
    return inl.inl_dynamics(x, v, 0.0, 0.9, 0.1, 0.5)[0]
found = torch.compile(public, fullgraph=True, backend=sys.argv[1])(h, h)
assert torch.allclose(found, public(h, h))
print("compiled")
"""


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
def test_a_training_step_compiles_as_one_graph_in_a_fresh_process(backend):
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, backend],
        env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "compiled\n", done.stderr[-2000:]
