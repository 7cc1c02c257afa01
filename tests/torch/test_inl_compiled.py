"""A compiled training step of INL dynamics is that of the plain formula, op for op.

Nor are the terms of sums wider than the formula's, and the program checks the tensors
of a call only, not our Python code.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch._functorch.compile_utils import fx_graph_cse
from torch.nn import functional

from inl import inl_dynamics, inl_dynamics_n_steps, inl_dynamics_step, set_backend
from inl_toolkit.functional.dynamics import WHOLE

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
    return [
        Counter(str(node.target) for node in calls(graph))
        for graph in graphs_of(run, operands)
    ]


def calls(graph):
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def graphs_of(run, operands):
    """The compiled forward and backward pass of a loss; its values are checked."""
    graphs = []

    def backend(module, inputs):
        def keep(graph, _inputs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_module_simplified(module, inputs, fw_compiler=keep, bw_compiler=keep)

    def loss(*given):
        return sum(each.float().square().mean() for each in run(*given))

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    gradients = torch.autograd.grad(compiled(*operands), operands)
    exact = torch.autograd.grad(loss(*operands), operands)
    torch.testing.assert_close(gradients, exact)
    assert len(graphs) == 2, "one forward and one backward pass"
    return graphs


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize(
    ("ours", "plain", "coefs"),
    [
        (inl_dynamics, formula, [SHAPE] * 3),
        (inl_dynamics_step, controlled_formula, [(*SHAPE[:-1], 3 * SHAPE[-1])]),
    ],
)
def test_compiled_steps_have_the_ops_of_the_formula(
    ours, plain, coefs, has_kernel, monkeypatch
):
    if has_kernel:
        # As on a GPU, where eager calls are ops of one launch each.
        monkeypatch.setattr("inl_torch.functional.triton_module", lambda *_: object())
    torch.manual_seed(0)
    sizes = [SHAPE, SHAPE, SHAPE[-1:], *coefs]
    operands = [torch.randn(size, requires_grad=True) for size in sizes]
    found, wanted = ops(ours, operands), ops(plain, operands)
    for got, most in zip(found, wanted, strict=True):
        assert not got - most, f"more than the formula: {got - most}"
        assert not any(name.startswith("inl.") for name in got), "an opaque op"


@pytest.mark.parametrize("shared", ["mu", "alpha"])
def test_the_terms_of_a_sum_are_not_wider_than_its_operand(shared):
    # Stored in float32, they are the largest traffic of a training step in bfloat16.
    torch.manual_seed(0)
    rows = [name == shared or name == "mu" for name in ("x", "v", "mu", "alpha")]
    operands = [
        torch.randn(SHAPE[-1:] if row else SHAPE, dtype=torch.bfloat16)
        for row in [*rows, False, False]
    ]
    for each in operands:
        each.requires_grad_()
    _, backward = graphs_of(inl_dynamics, operands)
    sums = [
        node.all_input_nodes[0].meta["val"].dtype
        for node in calls(backward)
        if node.target is torch.ops.aten.sum.dim_IntList
    ]
    assert len(sums) == sum(rows)
    assert {*sums} == {torch.bfloat16}


def test_nor_in_several_steps():
    torch.manual_seed(0)
    sizes = [SHAPE, SHAPE, SHAPE[-1:], (*SHAPE[:-1], 3 * SHAPE[-1])]
    operands = [torch.randn(size, dtype=torch.bfloat16) for size in sizes]
    for each in operands:
        each.requires_grad_()
    _, backward = graphs_of(lambda *given: inl_dynamics_n_steps(*given, 3), operands)
    sums = [
        node.all_input_nodes[0].meta["val"].dtype
        for node in calls(backward)
        if node.target is torch.ops.aten.sum.dim_IntList
    ]
    assert {*sums} == {torch.bfloat16}


def test_the_stored_terms_of_a_half_type_are_of_it():
    # A tensor that several ops read is stored: the gradient of the difference x - mu.
    torch.manual_seed(0)
    operands = [
        torch.randn(SHAPE[-1:] if at == 2 else SHAPE, dtype=torch.bfloat16)
        for at in range(6)
    ]
    for each in operands:
        each.requires_grad_()
    _, backward = graphs_of(inl_dynamics, operands)
    merged = fx_graph_cse(backward.graph)  # as the compiler does
    sums = torch.ops.aten.sum.dim_IntList
    (total,) = (node for node in merged.nodes if node.target is sums)
    (term,) = total.all_input_nodes
    assert term.meta["val"].dtype == torch.bfloat16
    assert len(term.users) > 1, "float32 terms would be what is shared, and stored"


def test_gradients_of_rows_in_half_types_are_those_of_float64():
    torch.manual_seed(0)
    sizes = [(4096, 16)] * 2 + [(16,)] + [(4096, 16)] * 3
    exact = [torch.randn(size, dtype=torch.float64).bfloat16() for size in sizes]

    def gradient_of_mu(run, dtype):
        given = [each.to(dtype).requires_grad_() for each in exact]
        loss = sum(each.double().square().sum() for each in run(*given))
        return torch.autograd.grad(loss, given[2])[0].double()

    wanted = gradient_of_mu(formula, torch.float64)
    error, plain = (
        (gradient_of_mu(run, torch.bfloat16) - wanted).abs().max()
        for run in (inl_dynamics, formula)
    )
    assert error <= plain
    assert error <= 2**-8 * wanted.abs().max()


@pytest.fixture(params=["auto", "torch"])
def setting(request):
    set_backend(request.param)
    yield
    set_backend("auto")


@pytest.mark.parametrize("run", [inl_dynamics_step, inl_dynamics_n_steps])
def test_the_compiler_sees_one_call(run, setting):
    x = torch.randn(2, 4)
    operands = (x, x, x[0], torch.randn(2, 12))
    extra = () if run is inl_dynamics_step else (3,)
    seen = []

    def backend(module, _inputs):
        seen.extend(node.target for node in calls(module) if node.target in WHOLE)
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(
        lambda *given: run(*given, *extra), fullgraph=True, backend=backend
    )
    torch.testing.assert_close(compiled(*operands), run(*operands, *extra))
    assert len(seen) == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_and_numbers_may_change(dynamic, setting):
    def run(x, controller, dt, n_steps):
        return inl_dynamics_n_steps(x, x, x[0], controller, n_steps, dt, limit=1.0)

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows, dt, n_steps in [(3, 0.1, 1), (5, 0.2, 2), (7, 0.3, 3)]:
        given = torch.randn(rows, 4), torch.randn(rows, 12), dt, n_steps
        torch.testing.assert_close(compiled(*given), run(*given))


def test_a_wrong_operand_is_refused_by_its_sentence():
    compiled = torch.compile(inl_dynamics, fullgraph=True, backend="eager")
    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match=r"mu: found shape \[3\], accepted"):
        compiled(x, x, x[0, :3], x, x, x)


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
