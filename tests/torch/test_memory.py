"""Injected out-of-memory errors of torch: messages, and recovery."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import final

import numpy as np
import pytest
import torch

from inl.backend.base import DeviceMemory, Traits
from inl.device import Device
from inl.engine.core import EngineCore
from inl.errors import OutOfMemory
from inl.scheduling.request import Request
from inl.spec.cache import Paged
from inl.spec.limits import Limits
from inl_torch.backend import TorchBackend
from inl_torch.memory import find_oom

LIMITS = Limits(slots=4, blocks=(40,), block_size=4, max_blocks_per_seq=10, vocab=97)
TORCH_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "139.80 GiB of which 1.10 GiB is free."
)


def raise_oom():
    raise torch.cuda.OutOfMemoryError(TORCH_MESSAGE)


@final
class Small(TorchBackend):
    """A device without memory for steps of more than 12 tokens, or for a state."""

    traits = Traits()
    full_for = ()

    def __init__(self):
        self.device, self.place = Device("cuda:0"), torch.device("cpu")

    def memory(self):
        return DeviceMemory(1 << 30, 12345)

    def kernels(self):
        for kernel in super().kernels():
            limited = kernel.op == "qkv_linear"
            yield replace(kernel, run=_limited(kernel.run)) if limited else kernel

    def zeros(self, shape, dtype):
        if "state" in self.full_for:
            raise_oom()
        return super().zeros(shape, dtype)


def _limited(run):
    def limited(x, *args, **attrs):
        if x.shape[0] > 12:
            raise_oom()
        return run(x, *args, **attrs)

    return limited


def answers(core, prompts):
    requests = [Request(ids, max_tokens=6) for ids in prompts]
    numbers = [core.add(request) for request in requests]
    errors = {}
    while core.has_work:
        for event in core.step():
            if event.error:
                errors[numbers.index(event.request)] = event.error
    return [request.output_ids for request in requests], errors


def test_a_step_that_does_not_fit_fails_and_the_next_one_runs(tiny_llama):
    core = EngineCore(tiny_llama(3).runner(Small(), "float32", LIMITS))
    fits = [[4, 88, 17], [5] * 9]
    want, errors = answers(core, fits[:1])
    assert not errors
    _, errors = answers(core, [[*range(20)]])
    assert str(errors[0]) == (
        "cuda:0: step of 20 tokens: 2.00 GiB more does not fit, 12345 bytes are free; "
        "lower token_budget, max_batch or cache_bytes"
    )
    assert isinstance(errors[0].__cause__, torch.cuda.OutOfMemoryError)
    found, errors = answers(core, fits)
    assert not errors
    assert found[0] == want[0]


def test_the_error_releases_the_tensors_of_the_call():
    held = []

    def step(x):
        big = torch.zeros(100) + x
        held.append(weakref.ref(big))
        raise_oom()

    program = Small().compile(step, None, consumes=())
    with pytest.raises(OutOfMemory) as caught:
        program(1)
    assert caught.value.__cause__ is not None
    assert held[0]() is None


def test_oom_of_a_state_names_its_size(tiny_llama):
    backend = Small()
    backend.full_for = ("state",)
    with pytest.raises(
        OutOfMemory,
        match=r"cuda:0: state: 23904 bytes .* do not fit, 12345 bytes are free; "
        r"for 4 slots and 40 blocks of 4 tokens",
    ):
        backend.state((Paged((0,), 2, 8, "float32"),), limits=LIMITS)


def test_oom_of_weights_names_the_group_and_the_total(tiny_llama, monkeypatch):
    count = []

    def some(self, data, *, real=TorchBackend.tensor):
        count.append(data)
        if len(count) == 7:
            from inl_torch.memory import allocating

            with allocating(data.size * 4, str(self.device), self.memory):
                raise_oom()
        return real(self, data)

    monkeypatch.setattr(TorchBackend, "tensor", some)
    with pytest.raises(
        OutOfMemory,
        match=r"weights: model\.layers\.\S+, group 6 of 18: cuda:0: \d+ bytes .* "
        r"12345 bytes are free.*all weights in float32 are about \d+ bytes",
    ):
        tiny_llama(3).runner(Small(), "float32", LIMITS)


def test_oom_is_found_among_causes():
    """A capture that runs out of memory raises a different error."""
    with pytest.raises(RuntimeError, match="previous error") as caught:  # noqa: PT012
        try:
            raise_oom()
        finally:
            raise RuntimeError("operation failed due to a previous error")
    assert isinstance(find_oom(caught.value), torch.cuda.OutOfMemoryError)
    assert find_oom(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert find_oom(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert find_oom(RuntimeError("illegal memory access")) is None
    assert find_oom(ValueError("out of memory")) is None


def test_other_errors_are_unchanged():
    program = Small().compile(lambda x: 1 / 0, None, consumes=())
    with pytest.raises(ZeroDivisionError):
        program(np.zeros(1))
