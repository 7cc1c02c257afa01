"""``apply_parallelism`` on two processes over gloo, against one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inl.errors import RequestError
from inl.optimizers import apply_parallelism, get_optimal_parallelism
from inl_torch.parallel import _split

SMALL = get_optimal_parallelism(
    model_size_params=10**6, num_devices=1, memory_per_device_gb=10
)
RANKS = Path(__file__).with_name("parallel_ranks.py")


@pytest.mark.timeout(300)
def test_losses_and_gradients_of_every_schedule_equal_one_device(tmp_path):
    """Also that ranks find a wrong target, and refuse what cannot be divided."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
        assert output.endswith("equal\n")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_stages_have_every_member_once_and_about_equal_weights(count):
    sizes = (8, 8, 8, 8, 64, 8, 8)
    members = [torch.nn.Linear(8, size, bias=False) for size in sizes]
    parts = _split(torch.nn.Sequential(*members), count)
    assert len(parts) == count
    assert [each for part in parts for each in part] == members
    assert all(len(part) for part in parts)
    if count == 3:
        assert [len(part) for part in parts] == [4, 1, 2]


def test_refusals():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RequestError, match="plan: found dict"):
        apply_parallelism(model, {})
    with pytest.raises(RequestError, match="schedule: found 'zigzag'"):
        apply_parallelism(model, SMALL, schedule="zigzag")
