"""The DirectML plugin without DirectML: registration, probe and settings."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import inl_directml.plugin
from inl.device import DeviceInfo, DeviceType
from inl.errors import BackendUnavailable
from inl.install_command import install_command
from inl.plugin import frameworks
from inl.plugin.hooks import GROUP
from inl_directml import probe
from inl_directml.settings import INSTALL

PROJECT = Path(__file__).parents[3] / "plugins" / "inl-directml" / "pyproject.toml"
NEEDED = {
    provider: modules if provider == "torch" else ("onnx", *modules)
    for provider, modules in probe.MODULES.items()
}
EVERYTHING = {name for names in probe.MODULES.values() for name in names} | {"onnx"}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that makes this a machine of a platform with some modules."""

    def make(platform, provider="", *, modules=EVERYTHING, wheel=True, wsl=False):
        monkeypatch.setenv("INL_DIRECTML_PROVIDER", provider)
        monkeypatch.setattr(probe, "PLATFORM", platform)
        monkeypatch.setattr(probe, "WSL", tmp_path / "dxg")
        monkeypatch.setattr(
            frameworks, "find_spec", lambda n: n if n in modules else None
        )
        monkeypatch.setattr(probe, "installed_version", lambda _: wheel or None)
        monkeypatch.setattr(probe, "require_framework", lambda *_: None)
        if wsl:
            (tmp_path / "dxg").touch()

    return make


@pytest.fixture
def registry(monkeypatch):
    """Display adapters in a made-up registry of Windows, by number of their key."""

    def fill(adapters):
        def value(key, name):
            if name not in key:
                raise FileNotFoundError
            return key[name], 1

        root = {"adapters": adapters}
        fake = SimpleNamespace(
            HKEY_LOCAL_MACHINE=root,
            OpenKey=lambda key, name: nullcontext(
                adapters if name == probe.ADAPTERS else key[name]
            ),
            QueryInfoKey=lambda key: (len(key), 0, 0),
            EnumKey=lambda key, number: list(key)[number],
            QueryValueEx=value,
        )
        monkeypatch.setitem(sys.modules, "winreg", fake)

    return fill


def test_adapters_of_windows_are_listed_with_their_memory(machine, registry):
    machine("win32")
    registry({
        "0000": {probe.DRIVER: "Radeon 780M", probe.MEMORY: 8 << 30},
        "0001": {probe.DRIVER: "Arc A770"},
        "Properties": {},
    })  # fmt: skip
    assert probe.probe() == [
        DeviceInfo(0, "Radeon 780M", 8 << 30),
        DeviceInfo(1, "Arc A770", None),
    ]
    machine("win32", "winml")
    assert [info.name for info in probe.probe()] == [
        "directml code on winml: Radeon 780M",
        "directml code on winml: Arc A770",
    ]
    registry({})
    with pytest.raises(BackendUnavailable, match="Windows lists no display adapter"):
        probe.probe()


@pytest.mark.parametrize(
    ("wsl", "reason"),
    [
        (False, r"part of Windows, and this is linux without \S+dxg; INL_DIRECTML_PRO"),
        (
            True,
            r"wheels for Windows only, and this is WSL .* the Python of Windows, or ",
        ),
    ],
)
def test_another_system_has_no_directml(machine, wsl, reason):
    machine("linux", wsl=wsl)
    with pytest.raises(BackendUnavailable, match=f"^no DirectX 12: .*{reason}"):
        probe.probe()


@pytest.mark.parametrize("provider", INSTALL)
def test_a_missing_package_is_named_with_its_install_line(machine, registry, provider):
    platform = "darwin" if provider in ("webgpu", "cpu") else "win32"
    registry({"0000": {}})
    for missing in NEEDED[provider]:
        machine(platform, provider, modules=EVERYTHING - {missing})
        with pytest.raises(BackendUnavailable) as caught:
            probe.probe()
        assert str(caught.value) == f"{missing} not installed. Try: {INSTALL[provider]}"
    machine(platform, provider)
    assert probe.probe()


def test_the_runtime_without_directml_is_not_enough(machine, registry):
    registry({"0000": {}})
    machine("win32", wheel=False)
    with pytest.raises(
        BackendUnavailable, match=r"^onnxruntime-directml .another build"
    ):
        probe.probe()


def test_webgpu_needs_a_vulkan_loader_on_linux(machine, monkeypatch):
    machine("linux", "webgpu")
    monkeypatch.setattr(probe, "LOADER", "libvulkan-nowhere.so.1")
    with pytest.raises(BackendUnavailable, match=r"no Vulkan: .* apt-get install"):
        probe.probe()
    monkeypatch.setattr(probe, "LOADER", None)  # the process itself
    assert [info.name for info in probe.probe()] == ["directml code on webgpu"]


def test_torch_directml_finds_a_gpu_of_wsl(machine):
    machine("linux", "torch")
    with pytest.raises(BackendUnavailable, match=r"^no DirectX 12: it is part"):
        probe.probe()
    machine("linux", "torch", wsl=True)
    (info,) = probe.probe()
    assert info.name == "directml code on torch: DirectX 12 GPU of WSL"


def test_the_cpu_must_be_asked_for_and_is_named(machine):
    machine("linux", "cpu")
    (info,) = probe.probe()
    assert (info.name, info.note) == (
        "directml code on cpu",
        "set by INL_DIRECTML_PROVIDER",
    )


def test_an_unknown_provider_is_refused(machine):
    machine("win32", "cuda")
    with pytest.raises(BackendUnavailable, match="found 'cuda', accepted: dml, winml"):
        probe.probe()


def test_every_install_line_names_an_extra():
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = {install_command(f"inl-directml[{extra}]") for extra in extras}
    assert set(INSTALL.values()) == lines
    assert set(INSTALL) == set(probe.MODULES) == set(extras)


def test_a_missing_device_is_refused_without_importing_a_framework():
    code = (
        "from pathlib import Path\n"
        "import inl_directml.probe as p\n"
        "p.WSL, p.PLATFORM = Path('/nowhere'), 'linux'\n"
        "from inl import Device, DeviceType\n"
        "print(Device(DeviceType.DIRECTML).why_not())\n"
        "import sys; assert not {'onnx', 'onnxruntime', 'inl_onnx'} & set(sys.modules)"
    )
    more = {"INL_PLUGINS": "inl_directml.plugin", "INL_DIRECTML_PROVIDER": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no DirectX 12: it is part of Windows, and this is")


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    assert project["entry-points"][GROUP] == {"directml": inl_directml.plugin.__name__}


@pytest.mark.parametrize(
    ("provider", "name"),
    [
        ("", "backend:DirectmlBackend"),
        ("cpu", "backend:DirectmlBackend"),
        ("torch", "legacy.backend:TorchDirectmlBackend"),
    ],
)
def test_it_registers_by_string(monkeypatch, provider, name):
    monkeypatch.setenv("INL_DIRECTML_PROVIDER", provider)
    found = []
    inl_directml.plugin.inl_register_backends(lambda *a, **k: found.append((a, k)))
    (((kind, backend), more),) = found
    assert kind == DeviceType.DIRECTML
    assert backend == f"inl_directml.{name}"
    assert more == {"probe": "inl_directml.probe:probe"}
