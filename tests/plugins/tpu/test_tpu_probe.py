"""The TPU plugin without a TPU: registration, and the probe on a made-up machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import inl_tpu.plugin
from inl.device import Device, DeviceInfo, DeviceType
from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl.plugin import frameworks
from inl.plugin.hooks import GROUP
from inl_tpu import probe

PROJECT = Path(__file__).parents[3] / "plugins" / "inl-tpu" / "pyproject.toml"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with the given PCI devices, and with JAX and libtpu."""
    monkeypatch.delenv("INL_TPU_PLATFORM")
    monkeypatch.setattr(frameworks, "find_spec", lambda name: name)
    for name in ("PCI", "PROCESSES", "DEVICE_FILES"):
        monkeypatch.setattr(probe, name, tmp_path / name)

    def plug(*ids, vendor="0x1ae0"):
        for number, each in enumerate(ids):
            folder = tmp_path / "PCI" / f"0000:00:{number:02x}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{each}\n")
        return tmp_path

    return plug


def test_chips_are_listed_with_memory_and_bandwidth(machine):
    machine("0x0063", "0x0063")
    assert probe.probe() == [
        DeviceInfo(index, "TPU v5e", 16 << 30, "", 8.1e11) for index in range(2)
    ]


def test_a_chip_of_two_devices_is_listed_twice(machine):
    machine("0x0076")
    assert [info.index for info in probe.probe()] == [0, 1]


@pytest.mark.parametrize("vendor", ["0x1ae0", "0x10de"])
def test_other_hardware_is_no_tpu(machine, vendor):
    """The gVNIC of a Google machine has the same vendor."""
    machine("0x0042", vendor=vendor)
    with pytest.raises(BackendUnavailable, match=r"no TPU: .* INL_TPU_PLATFORM=cpu"):
        probe.probe()


@pytest.mark.parametrize("held", ["accel3", "vfio/0", "vfio/vfio", "null"])
def test_a_tpu_held_by_another_process(machine, held):
    place = machine("0x005e")
    fd = place / "PROCESSES" / "4711" / "fd"
    fd.mkdir(parents=True)
    (fd.parent / "comm").write_text("python3\n")
    (fd / "9").symlink_to(place / "DEVICE_FILES" / held)
    if held in ("vfio/vfio", "null"):
        assert len(probe.probe()) == 1
        return
    with pytest.raises(BackendUnavailable, match=r"held by .*: python3 \(pid 4711\)"):
        probe.probe()


@pytest.mark.parametrize("missing", ["jax", "libtpu"])
def test_a_missing_package_is_named_with_its_install_line(
    machine, monkeypatch, missing
):
    machine("0x006f")
    found = {"jax", "libtpu"} - {missing}
    monkeypatch.setattr(frameworks, "find_spec", lambda name: name in found or None)
    with pytest.raises(BackendUnavailable) as caught:
        probe.probe()
    assert str(caught.value) == (
        f"{missing} not installed. Try: {install_command('inl-tpu[tpu]')}"
    )


def test_the_cpu_platform_needs_no_libtpu(machine, monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    monkeypatch.setattr(frameworks, "find_spec", lambda name: name == "jax" or None)
    assert [info.name for info in probe.probe()] == ["tpu code on cpu"] * 3


def test_the_cuda_platform_lists_gpus(machine, monkeypatch):
    place = machine()
    monkeypatch.setenv("INL_TPU_PLATFORM", "cuda")
    with pytest.raises(BackendUnavailable, match="INL_TPU_PLATFORM=cuda: no NVIDIA"):
        probe.probe()
    (place / "DEVICE_FILES").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (place / "DEVICE_FILES" / name).touch()
    assert [info.name for info in probe.probe()] == ["tpu code on cuda"] * 2


def test_an_unknown_platform_is_refused(monkeypatch):
    monkeypatch.setenv("INL_TPU_PLATFORM", "gpu")
    with pytest.raises(BackendUnavailable, match="found 'gpu', accepted: tpu, cpu"):
        probe.probe()


def test_a_missing_device_is_refused_without_importing_jax():
    code = (
        "from pathlib import Path\n"
        "import inl_tpu.probe as p; p.PCI = Path('/nowhere')\n"
        "from inl import Device, DeviceType\n"
        "print(Device(DeviceType.TPU).why_not())\n"
        "import sys; assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "INL_PLUGINS": "inl_tpu.plugin",
            "INL_TPU_PLATFORM": "",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no TPU: no PCI device of vendor 0x1ae0")


def test_an_index_beyond_the_devices_is_refused():
    from inl_tpu.backend import TpuBackend

    with pytest.raises(BackendUnavailable, match=r"tpu:99: JAX finds .* platform cpu"):
        TpuBackend(Device("tpu:99"))


def test_a_platform_that_jax_lacks_is_refused(monkeypatch):
    from inl_tpu.backend import TpuBackend

    monkeypatch.setenv("INL_TPU_PLATFORM", "tpu")
    with pytest.raises(BackendUnavailable, match="cannot use platform tpu: "):
        TpuBackend(Device("tpu:0"))


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    assert project["entry-points"][GROUP] == {"tpu": inl_tpu.plugin.__name__}


def test_it_registers_by_string():
    found = []
    inl_tpu.plugin.inl_register_backends(lambda *a, **k: found.append((a, k)))
    (((kind, backend), more),) = found
    assert kind == DeviceType.TPU
    assert backend == "inl_tpu.backend:TpuBackend"
    assert more == {
        "probe": "inl_tpu.probe:probe", "hosts": "inl_tpu.backend:open_host",
    }  # fmt: skip
