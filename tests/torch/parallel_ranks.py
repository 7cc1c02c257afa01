"""Ranks of test_parallel.py: each compares its parts with one device, in float64."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import distributed, nn

from inl.errors import RequestError
from inl.optimizers import apply_parallelism, get_optimal_parallelism

BATCH, WIDTH, STEPS, RATE = 8, 8, 3, 0.1
SMALL = get_optimal_parallelism(
    model_size_params=10**6, num_devices=1, memory_per_device_gb=10
)
SPLITS = (
    {"pipeline_parallel": 2, "schedule": "gpipe"},
    {"pipeline_parallel": 2, "schedule": "1f1b"},
    {"pipeline_parallel": 2, "schedule": "interleaved"},
    {"data_parallel": 2},
    {"tensor_parallel": 2},
)


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
              nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]  # fmt: skip
    return nn.Sequential(*layers).double()


def batches():
    torch.manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(BATCH, WIDTH).double(), torch.randn(BATCH, 4).double()


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def one_device():
    """Return the loss and the gradients of each step of plain torch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        steps.append((loss.detach(), grads))
        optimizer.step()
    return steps


def check(want, rank, factor, *, schedule="1f1b", **sizes):
    """Compare every loss and gradient. factor: of the targets."""
    model = network()
    names = {id(p): name for name, p in model.named_parameters()}
    found = apply_parallelism(
        model, replace(SMALL, **sizes), loss=nn.functional.mse_loss, micro_batches=4,
        schedule=schedule,
    )  # fmt: skip
    own = [names.get(id(p)) for p in found.parameters()]
    if len(found.parts) == 1 and "pipeline_parallel" not in sizes:
        own = list(names.values())  # the parameters are others, in the same order
    optimizer = torch.optim.SGD(found.parameters(), lr=RATE)
    copies = sizes.get("data_parallel", 1)
    share = slice(rank if copies > 1 else 0, None, copies)
    for (loss, grads), (x, y) in zip(want, batches(), strict=True):
        optimizer.zero_grad()
        got = found.step(x[share], y[share] * factor)
        if copies > 1:
            distributed.all_reduce(got)
        if found.last:
            assert torch.allclose(got / copies, loss, rtol=1e-10), (sizes, got, loss)
        for name, p in zip(own, found.parameters(), strict=True):
            assert torch.allclose(whole(p.grad), grads[name], rtol=1e-8), (sizes, name)
        optimizer.step()
    counts = torch.tensor([len(own)])
    distributed.all_reduce(counts)
    every = len(names) * (1 if "pipeline_parallel" in sizes else 2)
    assert int(counts) == every, f"{int(counts)} parameters, {every} in the model"


def refused(call, text):
    with pytest.raises(RequestError, match=text):
        call()


def main(rank, store):
    torch.set_num_threads(1)
    refused(lambda: apply_parallelism(network(), SMALL), "no process group")
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    want = one_device()
    for split in SPLITS:
        check(want, rank, 1.0, **split)
        try:
            check(want, rank, 1.01, **split)
        except AssertionError:
            continue
        raise AssertionError(f"a wrong target was not found: {split}")
    two = replace(SMALL, pipeline_parallel=2)
    refused(lambda: apply_parallelism(network(), SMALL), "found 2 processes")
    refused(lambda: apply_parallelism(nn.Linear(2, 2), two), "Sequential")
    short = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    refused(lambda: apply_parallelism(short, two, schedule="interleaved"), "at least 4")
    odd = apply_parallelism(network(), two, loss=nn.functional.mse_loss)
    refused(lambda: odd.step(torch.zeros(7, WIDTH), torch.zeros(7, 4)), "batch of 7")
    distributed.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
