"""Gradients against float64 differences of plain formulas; errors; optimizers."""

from __future__ import annotations

import numpy as np
import pytest

import inl
from inl import Device, Tensor, matmul, nn
from inl.errors import DeviceError, RequestError
from tensor_gradients import REFERENCE, check


@pytest.fixture
def rng():
    return np.random.default_rng(4)


def norm(x, w, b):
    mean, spread = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(spread + 1e-5) * w + b


def test_arithmetic_with_broadcasting(rng):
    a, b = rng.standard_normal((2, 3, 1)), 2 + rng.random((4,))
    check(
        lambda a, b: ((a * b - b) / (b + 1.5) - a**3 + (2 - a) * 3).sum(),
        lambda a, b: ((a * b - b) / (b + 1.5) - a**3 + (2 - a) * 3).sum(),
        a, b,
    )  # fmt: skip


def test_functions_and_reductions(rng):
    x = rng.standard_normal((3, 4))
    check(
        lambda x: (x.exp().sum(1).log() * x.tanh().mean(1)).sum() + x.relu().mean(),
        lambda x: (
            (np.log(np.exp(x).sum(1)) * np.tanh(x).mean(1)).sum()
            + np.maximum(x, 0).mean()
        ),
        x,
    )


def test_matmul_and_views(rng):
    a, b = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 5))
    check(
        lambda a, b: (matmul(a, b).reshape(6, 5).T ** 2).sum(),
        lambda a, b: ((a @ b) ** 2).sum(),
        a, b,
    )  # fmt: skip


def test_layers(rng):
    x, w, b = (rng.standard_normal(s) for s in ((5, 4), (3, 4), (3,)))
    layer, norm_layer = nn.Linear(4, 3), nn.LayerNorm(3)
    exact = norm(x @ w.T + b, np.ones(3), np.zeros(3))
    layer.load_state_dict({"weight": w, "bias": b})
    found = norm_layer(layer(Tensor(x))).numpy()
    assert np.allclose(found, exact, atol=1e-5)

    def ours(x, w, b):
        layer.weight, layer.bias = w, b
        scaled = norm_layer.to(REFERENCE)(layer(x))
        return nn.cross_entropy(scaled, [0, 2, 1, 1, 0])

    def plain(x, w, b):
        y = norm(x @ w.T + b, np.ones(3), np.zeros(3))
        logs = y - np.log(np.exp(y).sum(-1, keepdims=True))
        return -logs[np.arange(5), [0, 2, 1, 1, 0]].mean()

    check(ours, plain, x, w, b)


def test_embedding_adds_the_gradients_of_a_repeated_row():
    layer = nn.Embedding(4, 3, device=REFERENCE)
    index = Tensor([[1, 3], [1, 0]], REFERENCE, dtype="int32")
    found = layer(index)
    assert np.array_equal(found.numpy(), layer.weight.numpy()[[[1, 3], [1, 0]]])
    found.sum().backward()
    assert np.array_equal(
        layer.weight.grad.numpy(), [[1] * 3, [2] * 3, [0] * 3, [1] * 3]
    )
    for wrong in (Tensor([4], REFERENCE, dtype="int32"), Tensor([1], REFERENCE)):
        with pytest.raises(RequestError, match="Embedding: found"):
            layer(wrong)


def test_a_tensor_that_is_used_twice_gets_both_gradients():
    x = Tensor(3.0, REFERENCE, requires_grad=True)
    y = x * x
    (y + y * x).backward()
    assert x.grad.item() == 2 * 3 + 3 * 9
    (x * 2).backward()
    assert x.grad.item() == 33 + 2


def test_gradients_cross_devices():
    x = Tensor([1.0, 2.0], REFERENCE, requires_grad=True)
    moved = x.to("cpu")
    assert moved.device == Device("cpu")
    (moved * moved).sum().backward()
    assert x.grad.device == Device(REFERENCE)
    assert x.grad.numpy().tolist() == [2, 4]
    with pytest.raises(RequestError, match="operands on cpu:0 and reference:0"):
        moved + x


def test_a_module_moves_and_keeps_its_values():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False))
    before = model.state_dict()
    assert list(before) == ["0.weight", "0.bias", "2.weight"]
    assert model.to(Device(REFERENCE)) is model
    assert {p.device for p in model.parameters()} == {Device(REFERENCE)}
    for name, value in model.state_dict().items():
        assert np.array_equal(value, before[name])
    with pytest.raises(RequestError, match=r"missing, unknown or .* 2.weight"):
        model.load_state_dict({**before, "2.weight": np.ones((2, 2))})


def test_an_absent_device_is_refused_with_the_install_line(without_backend):
    without_backend("directml")
    with pytest.raises(DeviceError, match=r"pip install .*inl-directml\[dml\]"):
        Tensor([1, 2], Device("directml", 0))


def test_refusals():
    with pytest.raises(RequestError, match=r"matmul: found \[2, 3\] and \[2, 3\]"):
        matmul(Tensor(np.ones((2, 3))), Tensor(np.ones((2, 3))))
    with pytest.raises(RequestError, match="dtype: found 'float8'"):
        Tensor([1.0], dtype="float8")
    with pytest.raises(RequestError, match="one number that requires a gradient"):
        Tensor([1.0]).sum().backward()
    with pytest.raises(RequestError, match="3 integers of 0 to 3"):
        nn.cross_entropy(Tensor(np.ones((3, 4))), [0, 1, 4])


def test_public_names():
    assert inl.Tensor is nn.Tensor
    assert inl.matmul is nn.matmul
