"""The CUDA plugin without a GPU: registration, and the probe with a fake NVML."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import inl_cuda.plugin
from inl.device import DeviceInfo, DeviceType
from inl.errors import BackendUnavailable
from inl.plugin.hooks import GROUP
from inl_cuda import probe

PROJECT = Path(__file__).parents[3] / "plugins" / "inl-cuda" / "pyproject.toml"


@pytest.fixture(autouse=True)
def torch_for_cuda(monkeypatch):
    """A build of torch that the probe accepts, and Triton."""
    for name in ("require_torch", "without_triton"):
        monkeypatch.setattr(probe, name, lambda *_: "")


class Nvml:
    """NVML of a host with ``names`` GPUs."""

    def __init__(self, names=("H200", "L4"), start=0, memory=0):
        self.names, self.start, self.memory, self.ended = names, start, memory, 0
        self.nvmlErrorString = Words()

    def nvmlInit_v2(self):  # noqa: N802
        return self.start

    def nvmlShutdown(self):  # noqa: N802
        self.ended += 1

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = len(self.names)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        handle._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):  # noqa: N802
        handle._obj.value = 101
        return 0 if name == b"GPU-b" else 6

    def nvmlDeviceGetName(self, handle, name, size):  # noqa: N802
        name.value = self.names[handle.value - 100].encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        memory._obj.total = 1 << 30
        return self.memory


class Clocks(Nvml):
    """NVML of a driver that reports the memory clock and bus width of an H100."""

    def nvmlDeviceGetMaxClockInfo(self, handle, kind, clock):  # noqa: N802
        clock._obj.value = {2: 2619}[kind.value]
        return 0

    def nvmlDeviceGetMemoryBusWidth(self, handle, bits):  # noqa: N802
        bits._obj.value = 5120
        return self.memory


class Words:
    restype = ctypes.c_int

    def __call__(self, code):
        return {9: b"Driver Not Loaded"}.get(code)


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv(probe.VISIBLE, raising=False)

    def use(**kinds):
        library = Nvml(**kinds)
        monkeypatch.setattr(probe, "load", lambda: library)
        return library

    return use


def test_the_bandwidth_is_declared_where_the_driver_knows_it(monkeypatch):
    monkeypatch.delenv(probe.VISIBLE, raising=False)
    for failed, expected in ((0, 3.35232e12), (3, None)):
        monkeypatch.setattr(probe, "load", lambda code=failed: Clocks(memory=code))
        assert [info.bytes_per_second for info in probe.probe()] == [expected] * 2


def test_lists_gpus_with_memory(nvml):
    library = nvml()
    assert probe.probe() == [
        DeviceInfo(0, "H200", 1 << 30),
        DeviceInfo(1, "L4", 1 << 30),
    ]
    assert library.ended == 1


def test_memory_may_be_unknown(nvml):
    nvml(memory=3)
    assert probe.probe()[0].memory_bytes is None


@pytest.mark.parametrize(
    ("visible", "found"),
    [("1", ["L4"]), ("1,0", ["L4", "H200"]), ("GPU-b", ["L4"]), ("0,7,1", ["H200"])],
)
def test_visible_gpus_in_order(nvml, monkeypatch, visible, found):
    nvml()
    monkeypatch.setenv(probe.VISIBLE, visible)
    infos = probe.probe()
    assert [info.name for info in infos] == found
    assert [info.index for info in infos] == list(range(len(found)))


@pytest.mark.parametrize("visible", ["", "-1", "GPU-x", "NoDevFiles"])
def test_all_gpus_hidden(nvml, monkeypatch, visible):
    nvml()
    monkeypatch.setenv(probe.VISIBLE, visible)
    with pytest.raises(BackendUnavailable, match=f"{probe.VISIBLE} is '{visible}'"):
        probe.probe()


def test_a_failing_driver_gives_the_reason(nvml):
    nvml(start=9)
    with pytest.raises(BackendUnavailable, match=r"Driver Not Loaded \(NVML 9\)"):
        probe.probe()


def test_no_driver(monkeypatch):
    monkeypatch.setattr(probe, "LIBRARIES", ("no-such-library.so.1",))
    with pytest.raises(BackendUnavailable, match=r"no-such-library\.so\.1 not found"):
        probe.probe()


def test_a_missing_device_is_refused_with_the_reason():
    code = (
        "import inl_cuda.probe as p; p.LIBRARIES = ('gone.so',)\n"
        "from inl.plugin.device_selection import check_device\n"
        "from inl.errors import BackendUnavailable\n"
        "try: check_device('cuda:0')\n"
        "except BackendUnavailable as e: print(e)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "INL_PLUGINS": "inl_cuda.plugin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "cuda:0: no NVIDIA driver: gone.so not found" in done.stdout


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    assert project["entry-points"][GROUP] == {"cuda": inl_cuda.plugin.__name__}


def test_it_registers_by_string():
    found = []
    inl_cuda.plugin.inl_register_backends(lambda *a, **k: found.append((a, k)))
    (((kind, backend), more),) = found
    assert kind == DeviceType.CUDA
    assert backend == "inl_cuda.startup:open_backend"
    assert more == {"probe": "inl_cuda.probe:probe"}
