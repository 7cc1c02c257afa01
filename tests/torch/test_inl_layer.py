"""``inl.nn.InlDynamics`` as a ``torch.nn.Module``, and under data parallelism."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

from inl import nn

STATE = {
    "mu": (6,),
    "controller_in.weight": (4, 12),
    "controller_in.bias": (4,),
    "controller_out.weight": (18, 4),
    "controller_out.bias": (18,),
    "mu_proj.weight": (6, 6),
}


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.InlDynamics(6, controller=4)


def outputs(layer, dtype=torch.float32):
    torch.manual_seed(1)
    return layer(torch.randn(3, 6, dtype=dtype), torch.randn(3, 6, dtype=dtype))


def test_its_state_dict_has_the_names_of_a_checkpoint(layer):
    state = layer.state_dict()
    assert {name: tuple(each.shape) for name, each in state.items()} == STATE
    assert {name for name, _ in layer.named_parameters()} == set(STATE)
    other = nn.InlDynamics(6, controller=4)
    assert not torch.equal(outputs(other)[0], outputs(layer)[0])
    other.load_state_dict(state)
    for got, want in zip(outputs(other), outputs(layer), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="mu_proj"):
        nn.InlDynamics(6, controller=4, context=False).load_state_dict(state)


def test_to_converts_every_parameter(layer):
    wide = copy.deepcopy(layer).to(torch.float64)
    assert {each.dtype for each in wide.parameters()} == {torch.float64}
    for got, want in zip(
        outputs(wide, torch.float64),
        outputs(layer.double(), torch.float64),
        strict=True,
    ):
        assert torch.equal(got, want)
    assert next(layer.to("meta").parameters()).device.type == "meta"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_equal_and_independent(layer, copied):
    twin = copied(layer)
    assert torch.equal(outputs(twin)[0], outputs(layer)[0])
    with torch.no_grad():
        layer.mu.add_(1)
    assert not torch.equal(outputs(twin)[0], outputs(layer)[0])


RANK = """
import sys, torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from inl import moe, nn
rank, store = int(sys.argv[1]), "file://" + sys.argv[2]
distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.InlDynamics(6, controller=4)
        self.router = torch.nn.Linear(6, 3)
        self.experts = torch.nn.Parameter(torch.randn(3, 6, 6))
    def forward(self, h):
        h, v, _ = self.layer(h)
        y = moe.moe_dispatch(h, self.router(h), self.experts, capacity_factor=2.0)
        return y.square().mean() + v.square().mean()
torch.manual_seed(0)
plain = Model()
parallel = DistributedDataParallel(plain)
batches = torch.randn(2, 8, 6)
parallel(batches[rank]).backward()
found = [each.grad.clone() for each in plain.parameters()]
plain.zero_grad()
(plain(batches[0]) / 2 + plain(batches[1]) / 2).backward()
want = [each.grad for each in plain.parameters()]
assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, want))
plain.zero_grad()
plain(batches[rank]).backward()
own = [each.grad for each in plain.parameters()]
assert not any(torch.allclose(a, b, atol=1e-6) for a, b in zip(own, want))
distributed.destroy_process_group()
print("averaged", len(found))
"""


def test_gradients_of_two_processes_are_averaged(tmp_path):
    """``DistributedDataParallel`` gives the gradients of both batches together."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        results = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, err in results:
        assert out == "averaged 9\n", err[-2000:]
