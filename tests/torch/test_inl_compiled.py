"""A compiled training step of INL dynamics is that of the plain formula, op for op."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch.nn import functional

from inl import inl_dynamics, inl_dynamics_step

DT = 0.1
SHAPE = (2, 3, 8)


def formula(x, v, mu, alpha, beta, gate):
    v = alpha * v - beta * (x - mu)
    return x + DT * (gate * v), v


def controlled_formula(x, v, mu, controller):
    alpha, beta, gate = controller.chunk(3, -1)
    found = alpha.sigmoid(), functional.softplus(beta), gate.sigmoid()
    return formula(x, v, mu, *found)


def ops(run, operands):
    """Count the ops of the compiled forward and backward pass of a loss."""
    graphs = []

    def backend(module, inputs):
        def keep(graph, _inputs):
            names = (node for node in graph.graph.nodes if node.op == "call_function")
            graphs.append(Counter(str(node.target) for node in names))
            return make_boxed_func(graph.forward)

        return aot_module_simplified(module, inputs, fw_compiler=keep, bw_compiler=keep)

    def loss(*given):
        return sum(each.square().mean() for each in run(*given))

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    gradients = torch.autograd.grad(compiled(*operands), operands)
    exact = torch.autograd.grad(loss(*operands), operands)
    torch.testing.assert_close(gradients, exact)
    assert len(graphs) == 2, "one forward and one backward pass"
    return graphs


@pytest.mark.parametrize(
    ("ours", "plain", "coefs"),
    [
        (inl_dynamics, formula, [SHAPE] * 3),
        (inl_dynamics_step, controlled_formula, [(*SHAPE[:-1], 3 * SHAPE[-1])]),
    ],
)
def test_compiled_steps_have_the_ops_of_the_formula(ours, plain, coefs):
    torch.manual_seed(0)
    sizes = [SHAPE, SHAPE, SHAPE[-1:], *coefs]
    operands = [torch.randn(size, requires_grad=True) for size in sizes]
    found, wanted = ops(ours, operands), ops(plain, operands)
    for got, most in zip(found, wanted, strict=True):
        assert not got - most, f"more than the formula: {got - most}"
        assert not any(name.startswith("inl.") for name in got), "an opaque op"


def test_the_choice_of_a_kernel_is_traced(monkeypatch):
    # As on a GPU; there the search for Triton was a call that cannot be traced.
    pytest.importorskip("triton")
    monkeypatch.setattr("inl_torch.registered.dynamics.TRITON_DEVICES", ("cpu",))
    kernels = import_module("inl_torch.triton.dynamics.training")
    monkeypatch.setattr(kernels, "is_supported", lambda *_: False)
    x = torch.randn(3, 8)
    operands = (x, x, x[0], x, x, x)
    torch.compiler.reset()
    compiled = torch.compile(inl_dynamics, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*operands), inl_dynamics(*operands))
