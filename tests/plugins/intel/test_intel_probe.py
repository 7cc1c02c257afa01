"""The Intel plugin without a GPU: registration, and the probe on fake files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import inl_intel.plugin
from inl.device import DeviceInfo, DeviceType
from inl.errors import BackendUnavailable
from inl.plugin.hooks import GROUP
from inl_intel import probe as module
from inl_intel.probe import FAMILIES, INSTALL, IPEX, LOADER, probe

PROJECT = Path(__file__).parents[3] / "plugins" / "inl-intel" / "pyproject.toml"
BUILD = "__version__ = '2.10.0+xpu'\nhip: str = None\nxpu: str = '20250200'\n"
ARC_A770, ARC_B580 = ("0x56a0", "i915", 16 << 30), ("0xe20b", "xe", 0)
UHD_630 = ("0x3e92", "i915", 0)


def loaded(name):
    assert name == LOADER


def missing(name):
    raise OSError(name)


def refusal(root, load=loaded):
    with pytest.raises(BackendUnavailable) as caught:
        probe(root, load)
    return str(caught.value)


def test_gpus_are_listed_by_family(host, torch_version):
    torch_version(BUILD)
    assert probe(host(ARC_A770, ARC_B580), loaded) == [
        DeviceInfo(0, "Intel Arc A series (0x56a0)", 16 << 30),
        DeviceInfo(1, "Intel Arc B series (0xe20b)"),
    ]


@pytest.mark.parametrize(
    ("mask", "found"), [("1", ["0xe20b"]), ("0.1,1", ["0x56a0", "0xe20b"]), ("", None)]
)
def test_visible_gpus(host, torch_version, monkeypatch, mask, found):
    torch_version(BUILD)
    root = host(ARC_A770, ARC_B580)
    monkeypatch.setenv("ZE_AFFINITY_MASK", mask)
    names = [info.name.partition("(")[2].rstrip(")") for info in probe(root, loaded)]
    assert names == (found or ["0x56a0", "0xe20b"])


def test_all_gpus_hidden(host, torch_version, monkeypatch):
    torch_version(BUILD)
    root = host(ARC_A770)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "7")
    assert "ZE_AFFINITY_MASK is '7'" in refusal(root)


@pytest.mark.parametrize(
    ("cards", "vendor"),
    [((), "0x8086"), ((ARC_A770,), "0x10de"), ((("0x56a0", "vfio-pci", 0),), "0x8086")],
)
def test_no_gpu(host, cards, vendor):
    text = refusal(host(*cards, vendor=vendor))
    assert "no Intel GPU: no device of vendor 0x8086 with driver xe or i915" in text
    assert "--device /dev/dri" in text


def test_old_graphics_are_told_apart(host):
    assert "Intel GPU (0x3e92): older than the GPUs" in refusal(host(UHD_630))


def test_old_graphics_beside_a_gpu_are_left_out(host, torch_version):
    torch_version(BUILD)
    (info,) = probe(host(UHD_630, ARC_B580), loaded)
    assert (info.index, info.name) == (0, "Intel Arc B series (0xe20b)")


def test_no_level_zero(host, torch_version):
    torch_version(BUILD)
    text = refusal(host(ARC_B580), missing)
    assert text.startswith(f"no Level Zero loader: {LOADER} not found. Try: apt-get")


def test_torch_without_xpu(host, torch_version):
    torch_version("__version__ = '2.13.0+cpu'\nxpu: str = None\n")
    text = refusal(host(ARC_B580))
    assert "found torch 2.13.0+cpu, built for CPUs only" in text
    assert text.endswith(f"needs a build for XPU. Try: {INSTALL}")


def test_the_discontinued_extension_is_reported(host, torch_version, monkeypatch):
    torch_version(BUILD)
    monkeypatch.setattr(module, "find_spec", lambda name: name == IPEX)
    (info,) = probe(host(ARC_B580), loaded)
    assert "not used: it is discontinued" in info.note


def test_families_are_told_by_their_first_digits():
    assert {len(prefix) for prefix in FAMILIES} == {5}


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    assert project["entry-points"][GROUP] == {"intel": inl_intel.plugin.__name__}


def test_it_registers_by_string():
    found = []
    inl_intel.plugin.inl_register_backends(lambda *a, **k: found.append((a, k)))
    (((kind, backend), more),) = found
    assert kind == DeviceType.XPU
    assert backend == "inl_intel.backend:XpuBackend"
    assert more == {"probe": "inl_intel.probe:probe"}
