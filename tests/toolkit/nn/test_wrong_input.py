"""What users pass to tensors, layers and optimizers, rightly or by mistake."""

from __future__ import annotations

import numpy as np
import pytest

from inl import Tensor, matmul, nn
from inl.errors import RequestError
from inl.optimizers import apply_kernel_fusion, get_optimal_parallelism

DEVICES = ["reference:0", "cpu:0"]
X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_beside_tensors(device):
    t = Tensor(X, device)
    for found, wanted in [
        (X + t, X + X), (t - X, X - X), (t @ X, X @ X), (X @ t, X @ X),
        (matmul(t, X.tolist()), X @ X), (t * 2, X * 2), (1 / t, 1 / X),
    ]:  # fmt: skip
        assert isinstance(found, Tensor)
        assert str(found.device) == device
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(t), X)
    assert np.asarray(t).dtype == np.float32
    np.testing.assert_array_equal(Tensor(t, device).numpy(), X)
    np.testing.assert_array_equal(t.reshape((4, 1)).numpy(), X.reshape(4, 1))


def test_one_number():
    assert float(Tensor([2.5])) == 2.5
    assert not Tensor([0.0])
    assert Tensor(3.0)
    with pytest.raises(RequestError, match="accepted: one element"):
        bool(Tensor([1.0, 0.0]))
    with np.errstate(divide="ignore"):
        assert float(Tensor([1.0]) / 0) == np.inf


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t + np.ones(3), r"shapes \[2, 2\] and \[3\], accepted"),
        (lambda t: nn.mse_loss(t, np.ones((3, 2))), r"\[2, 2\] and \[3, 2\]"),
        (lambda t: matmul(t, np.ones((3, 2))), r"matmul: found \[2, 2\] and \[3, 2\]"),
        (lambda t: Tensor("a"), "data: found 'a', accepted: an array or nested"),
        (lambda t: Tensor([[1, 2], [3]]), r"data: found \[\[1, 2\], \[3\]\]"),
        (lambda t: nn.LayerNorm(3, device=t.device)(t), r"LayerNorm: found input"),
        (lambda t: nn.Linear(3, 1, device=t.device)(X), r"Linear: found input \[2, 2"),
    ],
)
def test_refusals_say_what_was_found(device, call, message):
    with pytest.raises(RequestError, match=message):
        call(Tensor(X, device))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(0, 3), "Linear: inputs: found 0, accepted: a whole number"),
        (lambda: nn.Linear(2, 2.5), "Linear: outputs: found 2.5"),
        (lambda: nn.Embedding(2, -1), "Embedding: width: found -1"),
        (lambda: nn.LayerNorm(0), "LayerNorm: size: found 0"),
        (lambda: nn.Sequential(np.tanh), "Sequential: found <ufunc 'tanh'>, accepted"),
        (lambda: nn.Sequential([nn.ReLU()]), "accepted: layers, each an argument"),
        (lambda: nn.SGD(nn.Linear(2, 2).parameters(), lr=-1), "SGD: .* lr -1, acc"),
        (lambda: nn.Adam([]), "Adam: found 0 parameters"),
        (lambda: apply_kernel_fusion(nn.Linear(2, 2)), "found Linear, accepted: a tor"),
        (lambda: get_optimal_parallelism(model_size_params="7B", num_devices=1,
                                         memory_per_device_gb=80),
         "model_size_params: found '7B', accepted: a number above 0"),
    ],
)  # fmt: skip
def test_settings_are_refused(make, message):
    with pytest.raises(RequestError, match=message):
        make()


def test_a_layer_takes_arrays_of_the_host():
    layer = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    np.testing.assert_array_equal(layer(X).numpy(), layer(Tensor(X)).numpy())


def test_a_gradient_of_torch_is_not_lost_silently():
    torch = pytest.importorskip("torch")
    with pytest.raises(RequestError, match=r"accepted: its detach\(\)"):
        Tensor(torch.ones(2, requires_grad=True))
