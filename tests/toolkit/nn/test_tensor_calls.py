"""Calls of tensors against NumPy and torch, gradients against float64 differences."""

from __future__ import annotations

import numpy as np
import pytest

from inl import Tensor, nn
from inl.errors import RequestError
from tensor_calls import CALLS, FORMULAS, INDEXES, X
from tensor_gradients import REFERENCE, check, differences


def tensor(data, **options):
    return Tensor(data, REFERENCE, **options)


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_selects_what_numpy_does_with_its_gradient(name):
    key = INDEXES[name]
    found = tensor(X)[key]
    wanted = X.astype(np.float32)[key]
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.numpy(), wanted)
    check(lambda x: (x[key] ** 2).sum(), lambda x: (x[key] ** 2).sum(), X)


def test_tensors_as_indexes():
    x, rows = tensor(X), tensor([2, 0], dtype="int32")
    np.testing.assert_array_equal(x[rows].numpy(), x.numpy()[[2, 0]])
    mask = (x > -1) & (x < 1)
    inside = x.numpy()[(x.numpy() > -1) & (x.numpy() < 1)]
    np.testing.assert_array_equal(x[mask].numpy(), inside)
    for wrong in (tensor([1.0]), 3, (0, 0, 0, 0), "a", [[True]], 1.5):
        with pytest.raises(RequestError, match="Tensor: index"):
            x[wrong]


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_numpys_name_and_result(name):
    call = CALLS[name]
    found, wanted = call(tensor(X)), call(X)
    assert found.shape == np.shape(wanted)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-6, atol=1e-6)
    if name == "item":  # a number without a gradient
        return
    check(lambda x: (call(x) ** 2).sum(), lambda x: (call(x) ** 2).sum(), X)


@pytest.mark.parametrize("name", FORMULAS)
def test_calls_equal_a_formula(name):
    call, formula = FORMULAS[name]
    found, wanted = call(tensor(X)), formula(X)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-6, atol=2e-6)
    check(lambda x: (call(x) ** 2).sum(), lambda x: (formula(x) ** 2).sum(), X)


def test_equal_maxima_share_the_gradient():
    x = tensor([[1.0, 3.0, 3.0]], requires_grad=True)
    x.max(1).sum().backward()
    assert x.grad.tolist() == [[0, 0.5, 0.5]]


def test_comparisons_and_masks():
    x, y = tensor([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])
    assert (x < y).tolist() == [True, False, False]
    assert (x <= y).tolist() == [True, True, False]
    assert (x > 1).tolist() == [False, True, True]
    assert (x >= 2).tolist() == [False, True, True]
    assert (x == y).tolist() == [False, True, False]
    assert (x != y).tolist() == [True, False, True]
    assert (~((x > 1) & (x < 3)) | (x == 2)).tolist() == [True, True, True]
    assert ((x > 1).dtype, (x > 1).sum().item()) == ("bool", 2)
    assert bool((x > 0).all())
    assert not (x > 2).all()
    assert (x > 2).any()
    assert x.argmax().item() == 2
    assert tensor([[1.0, 5.0], [7.0, 2.0]]).argmin(1).tolist() == [0, 1]
    assert x != None  # noqa: E711 - what users write
    assert 2 in x
    assert len({x, x, tensor([1.0])}) == 2
    with pytest.raises(RequestError, match="&: found float32 and bool"):
        x & (x > 1)


def test_dtypes_of_results():
    whole, x = tensor([1, 2, 3], dtype="int32"), tensor([0.5, 1.0, 2.0])
    for found, dtype, values in (
        (whole + 1, "int32", [2, 3, 4]),
        (whole * whole, "int32", [1, 4, 9]),
        (whole + 0.5, "float32", [1.5, 2.5, 3.5]),
        (whole * x, "float32", [0.5, 2, 6]),
        (whole / 2, "float32", [0.5, 1, 1.5]),
        (whole**2, "int32", [1, 4, 9]),
        (2 - whole, "int32", [1, 0, -1]),
        (whole.sum(), "int32", 6),
        (whole.max(), "int32", 3),
        (whole.mean(), "float32", 2),
        ((x > 0.7) + 1, "int32", [1, 2, 2]),
        (x.astype("int32"), "int32", [0, 1, 2]),
        (whole.astype("bool"), "bool", [True] * 3),
        (tensor([True, False], dtype="bool"), "bool", [True, False]),
    ):
        assert (found.dtype, found.tolist()) == (dtype, values)
        assert str(found.numpy().dtype) == dtype
    assert type(whole[0].item()) is int
    assert int(x[2]) == 2
    assert f"{x[0]:.2f}" == "0.50"
    with pytest.raises(RequestError, match="requires_grad: found int32"):
        tensor([1], dtype="int32", requires_grad=True)


def test_length_and_iteration():
    x = tensor(X)
    assert (len(x), x.size, x.ndim) == (3, 24, 3)
    assert [row.tolist() for row in x] == x.tolist()
    first, *_ = x
    assert first.shape == (4, 2)
    for call in (len, list):
        with pytest.raises(TypeError, match="without axes"):
            call(x.sum())


REFUSED = {
    "axis: found 3": lambda x: x.sum(3),
    "axis: found (0, 0)": lambda x: x.max((0, 0)),
    "accepted: elements along": lambda x: x[:0].max(),
    "reshape: found [5, -1]": lambda x: x.reshape(5, -1),
    "reshape: found [-1, -1]": lambda x: x.reshape(-1, -1),
    "squeeze: axis: found 0": lambda x: x.squeeze(0),
    "unsqueeze: axis: found 9": lambda x: x.unsqueeze(9),
    "broadcast_to: found [5]": lambda x: x.broadcast_to(5),
    "permute: found [0, 1]": lambda x: x.permute(0, 1),
    "found a tensor, accepted: a number": lambda x: x**x,
    "shapes [3, 4, 2] and [5]": lambda x: x < np.ones(5),
    "where: condition: found 'float32'": lambda x: nn.where(x, 1, 2),
    "concatenate: found [3, 4, 2]": lambda x: nn.concatenate([x, x[0]]),
    "concatenate: found []": lambda _: nn.concatenate([]),
    "stack: found [3, 4, 2], [4, 2]": lambda x: nn.stack([x, x[0]]),
    "dtype: found 'int8'": lambda x: x.astype("int8"),
}


@pytest.mark.parametrize("says", REFUSED)
def test_refusals(says):
    with pytest.raises(RequestError) as caught:
        REFUSED[says](tensor(X))
    assert says in str(caught.value)


def test_the_gradient_check_can_fail():
    with pytest.raises(AssertionError):
        check(lambda x: x.sum(), lambda x: 2 * x.sum(), X)
    assert differences(lambda x: (x**2).sum(), [np.ones(2)])[0] == pytest.approx(2)
