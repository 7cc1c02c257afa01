"""Selection of OpenVINO's devices: settings, and the probe on fake files."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import inl_intel.plugin
import inl_intel.probe
from inl.device import Device, DeviceInfo
from inl.errors import BackendUnavailable
from inl_intel.openvino import probe as module
from inl_intel.openvino.probe import INSTALL, OPENVINO, probe
from inl_intel.settings import RUNTIMES, openvino_device, requested_runtime

PROJECT = Path(__file__).parents[3] / "plugins" / "inl-intel" / "pyproject.toml"


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The requirements that the probe checks, which all are met."""
    asked = []
    monkeypatch.setattr(module, "require_framework", lambda *args: asked.append(args))
    return asked


@pytest.fixture
def runtime(monkeypatch):
    return lambda value: monkeypatch.setenv("INL_XPU_RUNTIME", value)


def test_the_cpu_is_listed_with_the_setting(runtime, host, installed):
    runtime("openvino-cpu")
    note = "set by INL_XPU_RUNTIME"
    assert probe(host()) == [DeviceInfo(0, "OpenVINO on CPU", note=note)]
    assert installed == [(OPENVINO, INSTALL)]


def test_gpus_are_those_of_the_kernel(runtime, host):
    runtime("openvino-gpu")
    found = probe(host(("0xe20b", "xe", 0)))
    assert [info.name for info in found] == ["OpenVINO on Intel Arc B series (0xe20b)"]
    with pytest.raises(BackendUnavailable, match="no Intel GPU"):
        probe(Path("/nowhere"))


def test_an_npu_needs_its_driver(runtime, tmp_path):
    runtime("openvino-npu")
    with pytest.raises(BackendUnavailable, match=r"no Intel NPU: .* intel_vpu"):
        probe(tmp_path)
    folder = tmp_path / "sys/class/accel/accel0/device"
    folder.mkdir(parents=True)
    with pytest.raises(BackendUnavailable, match="no Intel NPU"):
        probe(tmp_path)
    (folder / "driver").symlink_to("/sys/bus/pci/drivers/intel_vpu")
    assert [info.name for info in probe(tmp_path)] == ["OpenVINO on NPU"]


@pytest.mark.parametrize("called", [requested_runtime, probe, inl_intel.probe.probe])
@pytest.mark.parametrize("value", ["openvino", "OpenVINO-CPU", "cuda"])
def test_other_values_are_refused(value, called, runtime):
    runtime(value)
    with pytest.raises(BackendUnavailable) as caught:
        called()
    assert str(caught.value) == (
        f"environment variable INL_XPU_RUNTIME: found {value!r}, accepted: torch, "
        "openvino-cpu, openvino-gpu, openvino-npu"
    )


def test_devices_have_openvinos_names(runtime):
    names = {}
    for value in RUNTIMES[1:]:
        runtime(value)
        names[value] = openvino_device(Device("xpu:0"))
    assert names == {
        "openvino-cpu": "CPU", "openvino-gpu": "GPU.0", "openvino-npu": "NPU"
    }  # fmt: skip
    with pytest.raises(BackendUnavailable, match=r"xpu:1: .* no OpenVINO device"):
        openvino_device(Device("xpu:1"))
    runtime("openvino-gpu")
    assert openvino_device(Device("xpu:1")) == "GPU.1"
    runtime("torch")
    with pytest.raises(BackendUnavailable, match="INL_XPU_RUNTIME is 'torch'"):
        openvino_device(Device("xpu:0"))


def test_a_missing_openvino_is_a_sentence_with_the_command(runtime, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("INL_XPU_RUNTIME", "openvino-cpu")
    monkeypatch.setattr("inl.plugin.frameworks.find_spec", lambda _: None)
    with pytest.raises(BackendUnavailable) as caught:
        probe()
    assert str(caught.value) == f"openvino not installed. Try: {INSTALL}"


def test_the_setting_selects_backend_and_probe(runtime):
    found = []
    runtime("openvino-cpu")
    inl_intel.plugin.inl_register_backends(lambda *a, **k: found.append((a, k)))
    ((_, backend), more) = found[0]
    assert backend == "inl_intel.openvino.backend:OpenVinoBackend"
    assert more == {"probe": "inl_intel.openvino.probe:probe"}


def test_the_extra_installs_what_the_probe_accepts():
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    assert project["optional-dependencies"]["openvino"] == [OPENVINO]


def test_the_probe_imports_no_framework():
    code = (
        "import sys, inl_intel.openvino.probe, inl_intel.plugin\n"
        "print({'openvino', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
