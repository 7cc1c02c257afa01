"""The CUDA backend; all but the first test need a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inl.device import Device
from inl.dtypes import wrap
from inl.errors import BackendUnavailable, InlError, OutOfMemory
from inl.spec.values import Bucket, Limits
from inl_cuda import probe
from inl_cuda.backend import CudaBackend, check_torch


def why_not():
    try:
        probe.probe()
    except InlError as error:
        return str(error)
    return None if torch.cuda.is_available() else "torch is built without CUDA"


REASON = why_not()
cuda = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
def test_a_torch_without_cuda_says_so():
    with pytest.raises(BackendUnavailable, match=r"cuda:0: torch .* finds no usable"):
        CudaBackend(Device("cuda:0"))


@pytest.fixture
def gpu():
    return CudaBackend(Device("cuda:0"))


@cuda
def test_an_index_beyond_the_last_is_refused():
    with pytest.raises(BackendUnavailable, match="torch finds"):
        check_torch(Device("cuda:999"))


@cuda
def test_memory_counts_what_is_taken(gpu):
    before = gpu.memory()
    held = gpu.tensor(wrap(np.zeros(1 << 24, np.float32)))
    after = gpu.memory()
    assert before.total == after.total
    assert before.total == pytest.approx(probe.probe()[0].memory_bytes, rel=0.02)
    assert before.free - after.free >= held.nbytes


@cuda
def test_float32_products_are_ieee(gpu):
    a = np.random.default_rng().standard_normal((2, 512, 512)).astype(np.float32)
    x, y = (gpu.tensor(wrap(part)) for part in a)
    exact = a[0].astype(np.float64) @ a[1].astype(np.float64)
    error = np.linalg.norm((x @ y).cpu().numpy() - exact) / np.linalg.norm(exact)
    assert error < 1e-5


@cuda
def test_a_state_that_does_not_fit_says_so(gpu):
    from inl.spec.values import Paged

    limits = Limits(2, (1 << 24,), 16, 4, 97)
    with pytest.raises(OutOfMemory, match="do not fit"):
        gpu.state((Paged((0,), 8, 128, "float32"),), limits=limits)


@cuda
def test_a_step_that_does_not_fit_says_so_and_the_next_one_runs(gpu):
    def greedy(_weights, message, state):
        if int(message[0]):
            torch.empty(1 << 42, device=message.device)
        return message + 1, state

    program = gpu.compile(greedy, None, consumes=(2,))
    frame = gpu.tensor(wrap(np.ones(1, np.int32)))
    with pytest.raises(OutOfMemory, match=r"Tried to allocate .* bytes are free"):
        program((), frame, ())
    result, _ = program((), frame * 0, ())
    assert result.tolist() == [1]


@cuda
def test_a_bucket_is_one_graph(gpu):
    calls = []

    def step(weights, message, state):
        calls.append(1)
        return message + weights[0], state

    program = gpu.compile(step, Bucket(1, 1), consumes=(2,))
    weights = (gpu.tensor(wrap(np.full(3, 5, np.int32))),)
    for number in (1, 2, 3):
        frame = gpu.tensor(wrap(np.full(3, number, np.int32)))
        arrived, _ = program(weights, frame, ())
        assert gpu.numpy(arrived).data.tolist() == [number + 5] * 3
    assert len(calls) == 3  # two to warm up, one to capture
