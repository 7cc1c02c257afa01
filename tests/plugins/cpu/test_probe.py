"""The CPU plugin: what it registers, and its probe."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import inl_cpu.plugin
import inl_cpu.probe
from inl.backend.host import host_memory
from inl.device import DeviceType
from inl.plugin.hooks import GROUP

PROJECT = Path(__file__).parents[3] / "plugins" / "inl-cpu" / "pyproject.toml"


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


def test_the_probe_that_it_registers_exists():
    assert inl_cpu.probe.probe.__module__ == "inl_cpu.probe"


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


def test_that_check_can_fail():
    assert "numpy" in modules_after("import inl_cpu.native_backend")


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


def test_a_system_without_cpuinfo_still_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(inl_cpu.probe, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "")
    assert inl_cpu.probe.cpu_name() == "CPU"
