"""A network of ``inl.nn`` learns digits as well as torch's, on each backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inl import Tensor, nn

torch = pytest.importorskip("torch")

DIGITS = Path(__file__).parents[1] / "data" / "digits" / "digits.csv.gz"
TRAINED, BATCH, EPOCHS, WIDTH = 1297, 100, 5, 48


@pytest.fixture(scope="module")
def digits():
    data = np.loadtxt(DIGITS, delimiter=",", dtype=np.int32)
    order = np.random.default_rng(0).permutation(len(data))
    pixels, classes = data[order, :-1] / 16, data[order, -1]
    return pixels.astype(np.float32), classes


def batches():
    rng = np.random.default_rng(1)
    for _ in range(EPOCHS):
        order = rng.permutation(TRAINED)
        for first in range(0, TRAINED, BATCH):
            yield order[first : first + BATCH]


@pytest.fixture(scope="module")
def torch_network(digits):
    """The first weights, the trained ones, and the accuracy of torch."""
    pixels, classes = map(torch.from_numpy, digits)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10)
    )
    first = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for rows in batches():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(pixels[rows]), classes[rows].long()
        )
        loss.backward()
        optimizer.step()
    found = model(pixels[TRAINED:]).argmax(1)
    return first, float((found == classes[TRAINED:]).float().mean())


def test_digits(tensor_device, digits, torch_network):
    pixels, classes = digits
    first, accuracy = torch_network
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    model.load_state_dict(first)
    model.to(tensor_device)
    optimizer = nn.Adam(model.parameters(), lr=1e-2)
    for rows in batches():
        optimizer.zero_grad()
        loss = nn.cross_entropy(
            model(Tensor(pixels[rows], tensor_device)), classes[rows]
        )
        loss.backward()
        optimizer.step()
    logits = model(Tensor(pixels[TRAINED:], tensor_device)).numpy()
    found = float((logits.argmax(1) == classes[TRAINED:]).mean())
    assert accuracy > 0.93
    assert abs(found - accuracy) <= 3 / len(logits)


def test_an_untrained_network_does_not_reach_it(digits, torch_network):
    pixels, classes = digits
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    found = model(Tensor(pixels[TRAINED:])).numpy().argmax(1)
    assert (found == classes[TRAINED:]).mean() < 0.5 < torch_network[1]
