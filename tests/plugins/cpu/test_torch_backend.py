<<<<<<< HEAD:tests/plugins/cpu/test_cpu.py
"""The CPU plugin: registration, probe, and the torch fallback."""
=======
"""The torch fallback of the CPU plugin."""
>>>>>>> rooms:tests/plugins/cpu/test_torch_backend.py

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


<<<<<<< HEAD:tests/plugins/cpu/test_cpu.py
def modules_after(statement):
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_plugin_registers_one_backend_by_name():
    given = []
    inl_cpu.plugin.inl_register_backends(lambda *a, **k: given.append((a, k)))
    assert given == [
        (
            (DeviceType.CPU, "inl_cpu.backend:open_cpu"),
            {"probe": "inl_cpu.probe:probe"},
        )
    ]


def test_registered_names_exist():
    assert inl_cpu.probe.probe.__module__ == "inl_cpu.probe"
    assert issubclass(TorchCpuBackend, Backend)


def test_the_distribution_names_the_plugin():
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert project["entry-points"] == {GROUP: {"cpu": "inl_cpu.plugin"}}
    assert importlib.util.find_spec("inl_cpu.plugin") is not None


@pytest.mark.parametrize(
    "statement",
    ["import inl_cpu.plugin", "import inl_cpu.probe; inl_cpu.probe.probe()"],
)
def test_finding_the_cpu_imports_nothing_heavy(statement):
    assert modules_after(statement).isdisjoint({"torch", "numpy", "inl_torch"})


def test_the_import_check_detects_torch():
    assert "torch" in modules_after("import inl_cpu.torch_backend")


def test_the_probe_finds_one_device_with_memory():
    (info,) = inl_cpu.probe.probe()
    assert info.index == 0
    assert info.memory_bytes == host_memory().total > 2**28


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Acme: One\n\nmodel name\t: Two\n", "Acme: One"),
        ("model name\t:  \n", None),
        ("", None),
    ],
)
def test_the_name_of_the_processor(text, name, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    monkeypatch.setattr(inl_cpu.probe, "CPUINFO", path)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "machine")
    assert inl_cpu.probe.cpu_name() == (name or "machine")


def test_the_name_without_cpuinfo(tmp_path, monkeypatch):
    monkeypatch.setattr(inl_cpu.probe, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "")
    assert inl_cpu.probe.cpu_name() == "CPU"


=======
def test_it_is_a_backend():
    assert issubclass(TorchCpuBackend, Backend)


>>>>>>> rooms:tests/plugins/cpu/test_torch_backend.py
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


<<<<<<< HEAD:tests/plugins/cpu/test_cpu.py
def test_compiled_programs_have_no_gradients():
    import numpy as np

=======
def test_what_it_compiles_keeps_no_gradients():
>>>>>>> rooms:tests/plugins/cpu/test_torch_backend.py
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
