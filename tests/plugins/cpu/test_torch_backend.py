"""The torch fallback of the CPU plugin."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import numpy as np
import pytest

from inl.backend.base import Backend
from inl.backend.host import host_memory
from inl.device import Device
from inl.dtypes import HostArray, wrap
from inl.errors import DeviceError
from inl.spec.cache import Paged
from inl.spec.limits import Limits

torch = pytest.importorskip("torch")
TorchCpuBackend = importlib.import_module("inl_cpu.torch_backend").TorchCpuBackend
pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _same_threads_after(monkeypatch):
    monkeypatch.delenv("INL_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_is_a_backend():
    assert issubclass(TorchCpuBackend, Backend)


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_the_requested_device(name):
    backend = TorchCpuBackend(Device(name))
    assert str(backend.device) == "cpu:0"
    assert backend.memory().total == host_memory().total
    assert backend.buckets(Limits(2, (2,), 16, 2, 97)) == ()


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_cache_dtypes(dtype, torch_dtype):
    backend = TorchCpuBackend(Device("cpu"))
    assert dtype in backend.traits.dtypes
    limits = Limits(slots=2, blocks=(3,), block_size=16, max_blocks_per_seq=2, vocab=97)
    state = backend.state((Paged((0,), 2, 8, dtype),), limits=limits)
    assert state.caches[0].k.dtype == torch_dtype
    assert backend.numpy(state.caches[0].k).dtype == dtype


def test_float32_comes_first():
    assert TorchCpuBackend.traits.dtypes[0] == "float32"


def test_a_packed_dtype_is_refused_by_name():
    packed = HostArray(np.zeros((2, 20), np.uint8), "q4_1", (2, 32))
    with pytest.raises(DeviceError, match=r"dtype: found 'q4_1', torch takes"):
        TorchCpuBackend(Device("cpu")).tensor(packed)


def test_compiled_programs_have_no_gradients():
    backend = TorchCpuBackend(Device("cpu"))
    x = backend.tensor(wrap(np.ones(3, np.float32))).requires_grad_()
    program = backend.compile(lambda a: (a * 2,), None, consumes=())
    (y,) = program(x)
    assert y.is_inference()
    assert y.tolist() == [2, 2, 2]


def test_the_variable_sets_the_thread_count(monkeypatch):
    monkeypatch.setenv("INL_THREADS", "1")
    TorchCpuBackend(Device("cpu"))
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("unset", [None, ""])
def test_without_the_variable_the_thread_count_is_unchanged(unset, monkeypatch):
    if unset is not None:
        monkeypatch.setenv("INL_THREADS", unset)
    before = torch.get_num_threads()
    TorchCpuBackend(Device("cpu"))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "found", ["0", "-1", "two", "1.5", " 2", "+2", "٣", "4097", "9" * 5000]
)
def test_an_invalid_thread_count_is_refused(found, monkeypatch):
    monkeypatch.setenv("INL_THREADS", found)
    with pytest.raises(DeviceError) as caught:
        TorchCpuBackend(Device("cpu"))
    assert "environment variable INL_THREADS" in str(caught.value)
    assert repr(found)[:40] in str(caught.value)
    assert "from 1 to 4096" in str(caught.value)
    assert len(str(caught.value)) < 200


def wait_policy(**environment):
    code = (
        "import os, inl_cpu.torch_backend; "
        "print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    )
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


def test_the_default_spin_count_and_user_overrides():
    assert wait_policy() == ["3000", "None"]
    assert wait_policy(GOMP_SPINCOUNT="7") == ["7", "None"]
    assert wait_policy(OMP_WAIT_POLICY="ACTIVE") == ["None", "ACTIVE"]
