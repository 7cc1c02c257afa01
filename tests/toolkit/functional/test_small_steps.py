"""The short path of small steps on torch's CPU tensors gives what the other does."""

from __future__ import annotations

import pytest

from inl import inl_dynamics
from inl.errors import RequestError

torch = pytest.importorskip("torch")
formula = pytest.importorskip("inl_torch.registered.formula")


def exact(x, v, mu, alpha, beta, gate, dt=0.1):
    x, v, mu, alpha, beta, gate = (
        each.double() for each in (x, v, mu, alpha, beta, gate)
    )
    velocity = alpha * v - beta * (x - mu)
    return x + dt * gate * velocity, velocity


def test_values_and_gradients():
    torch.manual_seed(0)
    for has_gradient in (False, True):
        given = [torch.randn(3, 5, requires_grad=has_gradient) for _ in range(6)]
        right = exact(*given)
        for _ in range(2):  # the second call finds the kind of the first
            found = inl_dynamics(*given)
            for part, true in zip(found, right, strict=True):
                assert torch.allclose(part.double(), true, rtol=0, atol=1e-6)
        if has_gradient:
            slopes = torch.autograd.grad(sum(x.sum() for x in found), given)
            wanted = torch.autograd.grad(sum(x.sum() for x in right), given)
            for part, true in zip(slopes, wanted, strict=True):
                assert torch.allclose(part, true, rtol=0, atol=1e-6)


def test_rows_broadcast_and_results_are_new():
    torch.manual_seed(0)
    x, row, one = torch.randn(3, 5), torch.randn(5), torch.randn(())
    given = x, one, row, row, one, row
    found = inl_dynamics(*given, dt=0.0)
    for part, true in zip(found, exact(*given, dt=0.0), strict=True):
        assert part.shape == x.shape
        assert torch.allclose(part.double(), true, rtol=0, atol=1e-6)
    assert found[0].data_ptr() != x.data_ptr()


def test_it_is_taken_and_left():
    x = torch.randn(2, 3)
    assert formula.one_step(*[x] * 6, 0.1) is not None
    assert formula.one_step(*[x] * 6, torch.tensor(0.1)) is None
    assert formula.one_step(*[x] * 5, 0.5, 0.1) is None
    assert formula.one_step(*[x] * 5, x.double(), 0.1) is None
    assert formula.one_step(*[x.half()] * 6, 0.1) is None
    assert formula.one_step(*[torch.nn.Parameter(x)] * 6, 0.1) is None


def test_wrong_operands_are_refused_after_right_ones():
    x = torch.randn(2, 3)
    inl_dynamics(*[x] * 6)
    for wrong in (torch.randn(2, 4), torch.ones(2, 3, dtype=torch.int64), "x"):
        with pytest.raises(RequestError, match="gate: found"):
            inl_dynamics(*[x] * 5, wrong)
    with pytest.raises(RequestError, match="dt: found"):
        inl_dynamics(*[x] * 6, dt="0.1")
    integers = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(RequestError, match="x: found int64"):
        inl_dynamics(*[integers] * 6)
