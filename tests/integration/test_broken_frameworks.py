"""Frameworks that are missing, of another version or broken: a row of `inl devices`.

The hardware of each plugin is made up, and its frameworks are packages of a few files.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest

import waiting
from inl.cli.devices import device_rows
from inl.device import Device, DeviceInfo
from inl.errors import BackendUnavailable
from inl.plugin import device_selection, frameworks
from inl.plugin.device_selection import make_backend
from inl.plugin.loader import load_registry
from inl.plugin.speed import Speed
from inl_cpu import selection
from inl_cuda import probe as cuda
from inl_directml import probe as directml
from inl_intel import probe as intel
from inl_rocm import probe as rocm
from inl_rocm.kfd import Gpu
from inl_torch import torch_build
from inl_torch.gpu.backend import has_triton
from inl_tpu import probe as tpu

ROOT = Path(__file__).parents[2]
FOUND = [DeviceInfo(0, "a device")]
TORCH = "__version__ = '{version}'\n{runtime} = '1'\n"
BROKEN = "raise OSError('libbroken.so: cannot open\\nshared object file')\n"


class Plugin(NamedTuple):
    """A plugin, and what its device is computed by."""

    name: str
    module: str
    """Framework that is broken in the tests."""
    version: str
    """One that is accepted."""
    replaced: dict
    """Functions of the probe without which it would find no device."""
    others: tuple = ()
    """Other frameworks that it needs, of accepted versions."""
    runtime: str = "cuda"
    """What torch is built for."""


PLUGINS = {
    "cpu": Plugin("cpu", "torch", "2.13.0", {}),
    "cuda": Plugin("cuda", "torch", "2.13.0", {
        (cuda, "load"): lambda: None, (cuda, "session"): nullcontext,
        (cuda, "handles"): lambda *_: [None], (cuda, "describe"): lambda *_: FOUND[0],
    }),
    "rocm": Plugin("rocm", "torch", "2.13.0", {
        (rocm, "attached"): lambda _: [Gpu("gfx942", None, 0, "")],
    }, runtime="hip"),
    "xpu": Plugin("intel", "torch", "2.13.0", {
        (intel, "attached"): lambda _: [intel.Card("0xe20b", "xe", None)],
        (intel, "ctypes"): SimpleNamespace(CDLL=lambda _: ctypes),
    }, runtime="xpu"),
    "tpu": Plugin("tpu", "jax", "0.10.2", {
        (tpu, "tpus"): lambda: FOUND, (tpu, "platform"): lambda: "tpu",
    }, (("libtpu", "0.0.42"),)),
    "directml": Plugin("directml", "onnxruntime", "1.24.4", {
        (directml, "adapters"): lambda: FOUND, (directml, "installed_version"): str,
        (directml, "provider"): lambda: "dml",
    }, (("onnx", "1.20.0"),)),
}  # fmt: skip
"""Device type -> its plugin."""

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK")  # fmt: skip


@pytest.fixture(params=PLUGINS)
def kind(request, monkeypatch, tmp_path):
    """A device type; its device is made up, and no framework is installed."""
    plugin = PLUGINS[request.param]
    for (module, name), value in plugin.replaced.items():
        monkeypatch.setattr(module, name, value)
    for name in HIDING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INL_CPU", "torch")
    monkeypatch.setenv("INL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(frameworks.CHILD, raising=False)
    monkeypatch.setattr(frameworks, "PATIENCE_SECONDS", 120.0)
    fakes = {plugin.module, *(name for name, _ in plugin.others), "triton"}
    for name in fakes:
        monkeypatch.delitem(sys.modules, name, raising=False)
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def find(name, *_):
        from importlib.util import find_spec

        file = site / name / "__init__.py"
        return find_spec(name) if name not in fakes or file.exists() else None

    for module in (frameworks, torch_build, selection):
        monkeypatch.setattr(module, "find_spec", find)
    return request.param


@pytest.fixture
def install(tmp_path):
    """Function: installs a package of this name, version and source."""

    def write(name, version, source="", runtime="cuda"):
        folder = tmp_path / "site" / name
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(source)
        build = TORCH.format(version=version, runtime=runtime)
        (folder / "version.py").write_text(build)
        about = tmp_path / f"site/{name}-{version}.dist-info"
        about.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (about / "METADATA").write_text(text)

    return write


@pytest.fixture
def row(kind, install):
    """Function: the row of the type, with its framework of a version and source."""
    plugin = PLUGINS[kind]

    def read(version=plugin.version, source=""):
        for name, other in plugin.others:
            install(name, other)
        if version is not None:
            install(plugin.module, version, source, plugin.runtime)
        known = load_registry((), (f"inl_{plugin.name}.plugin",))
        (found,) = [
            each for each in device_rows(known)
            if each["device"].partition(":")[0] == kind
        ]  # fmt: skip
        return found

    return read


def test_a_missing_framework(kind, row):
    found = row(version=None)
    assert found["status"] == "unavailable"
    text = rf"{PLUGINS[kind].module} (is )?not installed.*[Tt]ry: .*pip install"
    assert re.search(text, found["reason"]), found


def test_an_old_framework(kind, row):
    found = row(version="0.9.1")
    assert found["status"] == "unavailable"
    module = PLUGINS[kind].module
    assert f"found {module} 0.9.1, needs {module}>=" in found["reason"]
    assert re.search("Try: .*pip install", found["reason"])


def test_a_framework_whose_import_raises(kind, row):
    found = row(source=BROKEN)
    assert found["status"] == "unavailable"
    assert re.search(
        f"cannot import {PLUGINS[kind].module}: OSError: libbroken.so: cannot open "
        "shared object file. Try: .*pip install",
        found["reason"],
    )
    assert PLUGINS[kind].module not in sys.modules


def test_a_framework_that_crashes(kind, row):
    found = row(source="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert "was killed by SIGSEGV" in found["reason"]


def test_a_framework_that_can_be_imported(kind, row):
    found = row()
    assert (found["status"], found["reason"]) == ("ready", None)
    assert PLUGINS[kind].module not in sys.modules
    if kind in ("cuda", "rocm", "xpu"):
        assert found["note"].startswith("Triton is not installed")
    assert row(source="")["status"] == "ready"


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("3.3.1", "found Triton 3.3.1, needs triton>=3.4: slower, by torch's kernels"),
        ("3.4.0", ""),
        ("3.7.1+rocm7.1", ""),
    ],
)
def test_an_old_triton_is_not_used(kind, row, install, version, note):
    """Before 3.4 it lacks modules that the kernels import."""
    if kind not in ("cuda", "rocm", "xpu"):
        pytest.skip("does not use Triton")
    install("triton", version, f"__version__ = '{version}'\n")
    assert row()["note"].startswith(note)
    assert bool(row()["note"]) == bool(note)
    assert has_triton() == (not note)


def test_a_slow_failure_is_known_to_the_next_process(kind, row, monkeypatch, tmp_path):
    """A probe does not wait for an import that takes long."""
    monkeypatch.setattr(frameworks, "PATIENCE_SECONDS", 0.0)
    gate = tmp_path / "gate"
    wait = (
        "import os, time\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n{BROKEN}"
    )
    assert row(source=wait)["status"] == "ready"
    gate.touch()
    waiting.until(lambda: row(version=None)["status"] == "unavailable")
    assert "cannot import" in row(version=None)["reason"]
    mended = row(source="# reinstalled\n")
    assert mended["status"] == "ready"


def test_opening_a_device_names_the_failed_import(kind, row, monkeypatch):
    row(source=BROKEN)
    known = load_registry((), (f"inl_{PLUGINS[kind].name}.plugin",))
    with pytest.raises(
        BackendUnavailable, match=r"cannot import .* OSError: libbroken"
    ):
        make_backend(Device(kind), known)


WITHOUT_TRITON = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
import inl_cpu.torch_backend, inl_cuda.backend, inl_intel.backend, inl_rocm.backend
"""


@pytest.mark.full
def test_backends_are_imported_without_triton():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_auto_selects_among_all_six_and_says_why(monkeypatch):
    """In the documented order where all are as fast; each that is gone, by its
    reason.
    """
    for plugin in PLUGINS.values():
        for (module, name), value in plugin.replaced.items():
            monkeypatch.setattr(module, name, value)
    for name in HIDING:
        monkeypatch.delenv(name, raising=False)
    for module in (cuda, rocm, intel):
        monkeypatch.setattr(module, "require_torch", lambda *_: None)
    for module in (tpu, directml):
        monkeypatch.setattr(module, "check_installed", lambda _: None)
    monkeypatch.setattr(
        device_selection, "speed_of", lambda device, *_: Speed(device, 1e9, "declared")
    )
    modules = [f"inl_{plugin.name}.plugin" for plugin in PLUGINS.values()]
    order = ["cuda", "rocm", "xpu", "tpu", "directml", "cpu"]
    found = {"cuda": cuda, "rocm": rocm, "xpu": intel, "tpu": tpu, "directml": directml}
    for at, name in enumerate(order):
        choice = device_selection.choose_auto(load_registry((), modules))
        assert choice.device == Device(name)
        assert [speed.device.type for speed in choice.speeds] == (
            order[at:] if name != "cpu" else []
        )
        assert choice.why().startswith(f"auto selects {name}:0")
        assert choice.skipped == tuple(f"{gone}: no {gone}" for gone in order[:at])
        if name in found:
            reason = BackendUnavailable(f"no {name}")
            monkeypatch.setattr(found[name], "probe", Mock(side_effect=reason))


@pytest.mark.parametrize(
    ("requirement", "found", "accepted"),
    [
        ("jax>=0.10,<0.11", "0.10.2", True),
        ("jax>=0.10,<0.11", "0.11.0rc1", False),
        ("jax>=0.10,<0.11", "0.9.9", False),
        ("torch>=2.5", "2.13.0+cpu", True),
        ("torch>=2.4.1", "2.4.0", False),
        ("torch>=2.5", "2.5", True),
        ("torch_directml", "0.2.5.dev240914", True),
    ],
)
def test_versions(requirement, found, accepted):
    assert frameworks.accepts(requirement, found) == accepted


@pytest.mark.parametrize(
    ("plugin", "requirements"),
    [
        ("cpu", (selection.REQUIREMENT,)),
        ("cuda", (cuda.TORCH,)),
        ("rocm", (rocm.TORCH,)),
        ("intel", (intel.TORCH,)),
        ("tpu", (tpu.JAX,)),
        ("directml", directml.VERSIONS["onnx"][1:]),
    ],
)
def test_versions_are_those_of_the_packages(plugin, requirements):
    text = (ROOT / f"plugins/inl-{plugin}/pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)["project"]
    lists = project.get("optional-dependencies", {}).values()
    named = {*project["dependencies"], *(item for each in lists for item in each)}
    assert {*requirements} <= named
