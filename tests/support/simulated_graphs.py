"""A GPU backend in host memory, whose CUDA graphs replay recorded operators.

As on a GPU, a replay computes on the tensors of the capture: an input that is not
copied to its buffer, or a value that the host has read, stays that of the capture.
"""

from __future__ import annotations

from contextlib import contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inl.backend.base import Traits
from inl.backend.host import host_memory
from inl.device import Device
from inl_torch.eager import attention
from inl_torch.gpu import graphs
from inl_torch.gpu.backend import GpuBackend


class Graph(TorchDispatchMode):
    """Records operators, and computes them again into the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.replays = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host has read a value during a capture")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        self.replays += 1
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            pairs = zip(_tensors(result), _tensors(again), strict=True)
            for old, new in pairs:
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(result):
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


@contextmanager
def _nothing(*_, **__):
    yield


class HostCopy:
    """Stands for a copy to the host that has arrived."""

    def __init__(self, tensor):
        self.tensor = tensor.clone()

    def wait(self):
        return self.tensor


@final
class SimulatedGpu(GpuBackend):
    """Programs and step sizes of a GPU, with eager kernels in host memory."""

    traits = Traits(
        dtypes=("float32", "bfloat16"), depth=2, token_budget=256,
    )  # fmt: skip
    pool = SimpleNamespace(id=None)

    def __init__(self):
        self.device, self.place = Device("cuda:0"), torch.device("cpu")

    def uses_triton(self):
        return False

    def tuning(self):
        raise AssertionError("there are no Triton kernels")

    tuning_facts = tuning

    def memory(self):
        return host_memory()

    def to_device(self, x):
        return x.clone()

    def message(self, data):
        # On a GPU only a captured step can read a message of the host.
        return torch.as_tensor(super(GpuBackend, self).message(data))

    def numpy(self, x):
        return super(GpuBackend, self).numpy(x.wait() if type(x) is HostCopy else x)


@pytest.fixture
def simulated(monkeypatch):
    """A simulated GPU, and the graphs that it has captured."""
    made = []

    def graph():
        made.append(Graph())
        return made[-1]

    def capture(graph, *args, **keywords):
        torch_capture.bind(graph, *args, **keywords)
        return graph

    torch_capture = signature(torch.cuda.graph)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, value in (
        ("CUDAGraph", graph),
        ("graph", capture),
        ("Stream", lambda _: stream),
        ("stream", _nothing),
        ("current_stream", lambda _: stream),
    ):
        monkeypatch.setattr(graphs.torch.cuda, name, value)
    monkeypatch.setattr(graphs, "AsyncHostCopy", HostCopy)
    # In host memory it would read sizes during a capture.
    monkeypatch.setattr(attention, "exact_plan", attention.static_plan)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimulatedGpu(), made
    torch.set_num_threads(threads)
