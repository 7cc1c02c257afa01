"""The ROCm plugin without a GPU: registration, and the probe on fake files."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import inl_rocm.plugin
from inl.cli.devices import device_rows
from inl.device import DeviceInfo, DeviceType
from inl.errors import BackendUnavailable
from inl.plugin import device_selection
from inl.plugin.device_selection import choose_auto
from inl.plugin.hooks import GROUP
from inl.plugin.loader import load_registry
from inl.plugin.speed import Speed
from inl_rocm import kfd
from inl_rocm.chips import CHIPS, RELATED, chip_of
from inl_rocm.probe import INSTALL, probe, product_names

PROJECT = Path(__file__).parents[3] / "plugins" / "inl-rocm" / "pyproject.toml"
HIP = "__version__ = '2.10.0+rocm7.1'\ncuda: str = None\nhip: str = '7.1.2'\n"
MI300 = (90402, 0xA0, 0xC100, 192 << 30)
RX7900 = (110000, 0xB0, 0x0300, 24 << 30)
RX5700 = (100100, 0, 0x0500, 8 << 30)


@pytest.fixture
def two(host, torch_files):
    """A host with an MI300X and an RX 7900, and a ROCm build of torch."""
    torch_files(HIP)
    return host(*map(_node, (MI300, RX7900)))


def _node(facts):
    names = ("version", "unique_id", "location", "memory")
    return SimpleNamespace(**dict(zip(names, facts, strict=True)))


def refusal(root):
    with pytest.raises(BackendUnavailable) as caught:
        probe(root)
    return str(caught.value)


def test_gpus_are_listed_with_memory_and_family(two):
    assert probe(two) == [
        DeviceInfo(0, "AMD Instinct MI300 (gfx942)", 192 << 30, "", 5.3e12),
        DeviceInfo(1, "AMD Radeon RX 7000 (gfx1100)", 24 << 30, "", 9.6e11),
    ]


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["gfx1100", "gfx942"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "0"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000b0"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, ["gfx942"]),
    ],
)
def test_visible_gpus_in_order(two, monkeypatch, variables, found):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    infos = probe(two)
    assert [info.name.partition("(")[2].rstrip(")") for info in infos] == found
    assert [info.index for info in infos] == list(range(len(found)))


@pytest.mark.parametrize("value", ["", "-1", "GPU-ff"])
def test_all_gpus_hidden(two, monkeypatch, value):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", value)
    assert f"shows no GPU; HIP_VISIBLE_DEVICES is {value!r}" in refusal(two)


def test_without_a_driver(host, torch_files):
    torch_files(HIP)
    text = refusal(host(driver=False))
    assert "no AMD GPU driver" in text
    assert "--device /dev/kfd" in text


def test_a_host_of_cpus_has_no_gpu(host, torch_files):
    torch_files(HIP)
    assert refusal(host()) == "the AMD driver shows no GPU"


def test_without_permission(host, torch_files):
    torch_files(HIP)
    text = refusal(host(_node(MI300), device_file=False))
    assert "no permission for" in text
    assert "usermod -a -G render,video" in text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("__version__ = '2.13.0+cpu'\nhip: str = None\n", "built for CPUs only"),
        ("__version__ = '2.11.0+cu130'\ncuda: str = '13.0'\n", "built for CUDA 13.0"),
    ],
)
def test_torch_without_hip(host, torch_files, source, words):
    torch_files(source)
    text = refusal(host(_node(MI300)))
    assert words in text
    assert text.endswith(f"needs a build for ROCm. Try: {INSTALL}")


@pytest.mark.parametrize("source", [None, "def (", "hip = '7'\n"])
def test_damaged_torch(host, torch_files, source):
    torch_files(source)
    assert "torch is damaged: " in refusal(host(_node(MI300)))


def test_damaged_torch_is_a_row(host, torch_files, monkeypatch):
    torch_files("")
    root = host(_node(MI300))
    monkeypatch.setattr("inl_rocm.probe.probe", lambda: probe(root))
    rows = device_rows(load_registry((), ("inl_rocm.plugin",)))
    (row,) = [row for row in rows if row["device"] == "rocm"]
    assert row["status"] == "unavailable"
    assert row["reason"].startswith("torch is damaged: ")


def test_auto_prefers_a_gpu_to_the_cpu_and_says_why(two, monkeypatch):
    monkeypatch.setattr("inl_rocm.probe.probe", lambda: probe(two))
    monkeypatch.setattr(
        device_selection,
        "speed_of",
        lambda device, info, *_: Speed(
            device, info.bytes_per_second or 1e9, "declared"
        ),
    )
    known = load_registry((), ("inl_rocm.plugin", "inl_cpu.plugin"))
    choice = choose_auto(known)
    assert str(choice.device) == "rocm:0"
    assert "rocm:0" in choice.why()
    assert "cpu:0" in choice.why()


def test_without_torch(host, monkeypatch):
    monkeypatch.setattr("inl_torch.torch_build.find_spec", lambda _name: None)
    found = refusal(host(_node(MI300)))
    assert found == f"torch is not installed. Try: {INSTALL}"


def test_an_unknown_chip_is_listed_with_a_note(host, torch_files):
    torch_files(HIP)
    (info,) = probe(host(_node(RX5700)))
    assert info.name == "gfx1010"
    assert "computes without Triton; known: gfx1100, gfx1101" in info.note
    assert info.bytes_per_second is None


def test_nodes_that_cannot_be_read_are_left_out(two):
    file = two / kfd.TOPOLOGY / "1/properties"
    file.unlink()
    file.mkdir()
    (info,) = probe(two)
    assert "gfx1100" in info.name


@pytest.mark.parametrize("architecture", [*CHIPS, *RELATED])
def test_architectures_of_the_driver(architecture):
    """The driver's number of an architecture, as ROCm writes it."""
    versions = {
        "gfx90a": 90010, "gfx942": 90402, "gfx950": 90500, "gfx1100": 110000,
        "gfx1101": 110001, "gfx1102": 110002, "gfx1200": 120000, "gfx1201": 120001,
    }  # fmt: skip
    assert kfd.architecture(versions[architecture]) == architecture
    assert chip_of(f"{architecture}:sramecc+:xnack-") is chip_of(architecture)


def fake_amdsmi(**functions):
    calls = {
        "amdsmi_init": lambda: None, "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: [7],
        "amdsmi_get_gpu_device_bdf": lambda _handle: "0000:C1:00.0",
        "amdsmi_get_gpu_asic_info": lambda _handle: {"market_name": "MI300X OAM"},
    }  # fmt: skip
    return SimpleNamespace(**(calls | functions))


def test_amdsmi_names_the_product(two, monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi())
    names = [info.name for info in probe(two)]
    assert names == ["MI300X OAM", "AMD Radeon RX 7000 (gfx1100)"]


@pytest.mark.parametrize("name", ["", "N/A"])
def test_a_product_that_amdsmi_does_not_know(two, monkeypatch, name):
    fake = fake_amdsmi(amdsmi_get_gpu_asic_info=lambda _handle: {"market_name": name})
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    assert probe(two)[0].name == "AMD Instinct MI300 (gfx942)"


def test_a_failing_amdsmi_is_not_needed(two, monkeypatch):
    def fail():
        raise KeyError("driver")

    ended = []
    broken = fake_amdsmi(
        amdsmi_get_processor_handles=fail, amdsmi_shut_down=lambda: ended.append(1)
    )
    monkeypatch.setitem(sys.modules, "amdsmi", broken)
    assert product_names() == {}
    assert ended == [1]
    assert len(probe(two)) == 2


def test_a_missing_device_is_refused_without_importing_torch():
    code = (
        "from inl.plugin.device_selection import check_device\n"
        "from inl.errors import BackendUnavailable\n"
        "try: check_device('rocm:0')\n"
        "except BackendUnavailable as e: print(e)\n"
        "import sys; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "INL_PLUGINS": "inl_rocm.plugin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rocm:0: ")


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    assert project["entry-points"][GROUP] == {"rocm": inl_rocm.plugin.__name__}


def test_it_registers_by_string():
    found = []
    inl_rocm.plugin.inl_register_backends(lambda *a, **k: found.append((a, k)))
    (((kind, backend), more),) = found
    assert kind == DeviceType.ROCM
    assert backend == "inl_rocm.backend:RocmBackend"
    assert more == {"probe": "inl_rocm.probe:probe"}
