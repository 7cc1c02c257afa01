"""Indexing, reductions and functions of tensors on each kind of array."""

from __future__ import annotations

import numpy as np
import pytest

from inl import Tensor
from tensor_calls import CALLS, FORMULAS, INDEXES, X
from tensor_gradients import REFERENCE, check, found_gradients

torch = pytest.importorskip("torch")


@pytest.mark.full
def test_indexes(tensor_device):
    for key in INDEXES.values():
        found, wanted = Tensor(X, tensor_device)[key], X.astype(np.float32)[key]
        np.testing.assert_array_equal(found.numpy(), wanted)
        check(
            lambda x, key=key: (x[key] ** 2).sum(),
            lambda x, key=key: (x[key] ** 2).sum(),
            X,
            device=tensor_device,
        )


@pytest.mark.full
def test_calls(tensor_device):
    pairs = [(call, call) for call in CALLS.values()] + list(FORMULAS.values())
    for call, formula in pairs:
        found = call(Tensor(X, tensor_device)).numpy()
        np.testing.assert_allclose(found, formula(X), rtol=2e-5, atol=2e-6)
        ours, reference = (
            found_gradients(lambda x, call=call: (call(x) ** 2).sum(), [X], device)
            for device in (tensor_device, REFERENCE)
        )
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)


def test_dtypes(tensor_device):
    whole = Tensor([3, 1, 2], tensor_device, dtype="int32")
    for found, dtype, values in (
        (whole + 1, "int32", [4, 2, 3]),
        (whole * 0.5, "float32", [1.5, 0.5, 1]),
        (whole > 1, "bool", [True, False, True]),
        (whole.sum(), "int32", 6),
        (whole[whole > 1], "int32", [3, 2]),
        ((whole > 1).any(), "bool", True),
        (whole.argmax(), "int32", 0),
        (Tensor([True, False], tensor_device, dtype="bool") + 1, "int32", [2, 1]),
    ):
        assert (found.dtype, found.tolist()) == (dtype, values)
        assert str(found.numpy().dtype) == dtype


TIES = {
    "clip at a bound": (lambda x: x.clip(0, 1), lambda x: x.clamp(0, 1)),
    "relu at 0": (lambda x: x.relu(), lambda x: x.relu()),
    "abs at 0": (abs, abs),
    "equal maxima": (lambda x: x.max(0), lambda x: x.amax(0)),
    "equal minima": (lambda x: x.min(1), lambda x: x.amin(1)),
    "power 0": (lambda x: x**0, lambda x: x**0),
}


@pytest.mark.parametrize("name", TIES)
def test_gradients_where_two_are_possible_are_those_of_torch(name):
    ours, theirs = TIES[name]
    values = np.array([[0.0, 1.0, 2.0], [0.0, 1.0, -1.0]])
    (found,) = found_gradients(lambda x: (ours(x) * 3).sum(), [values])
    x = torch.tensor(values, requires_grad=True)
    (theirs(x) * 3).sum().backward()
    np.testing.assert_array_equal(found, x.grad.numpy())
