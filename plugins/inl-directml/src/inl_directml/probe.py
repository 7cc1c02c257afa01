"""Detection of DirectX 12 adapters and of ONNX Runtime; imports no framework."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inl.device import DeviceInfo
from inl.errors import BackendUnavailable
from inl.plugin.frameworks import (
    installed_version,
    require_framework,
    require_modules,
)
from inl_directml.settings import INSTALL, VARIABLE, provider

WSL = Path("/dev/dxg")
PLATFORM = sys.platform
ADAPTERS = (
    r"SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
)
"""Registry key of Windows with a numbered key for each display adapter."""

MEMORY = "HardwareInformation.qwMemorySize"
DRIVER = "DriverDesc"
LOADER = "libvulkan.so.1"

MODULES = {
    "dml": ("onnxruntime",),
    "winml": ("onnxruntime", "winui3"),
    "webgpu": ("onnxruntime", "onnxruntime_ep_webgpu"),
    "cpu": ("onnxruntime",),
    "torch": ("torch", "inl_torch", "torch_directml"),
}
"""Modules that a provider needs besides onnx, which "torch" does not need."""

VERSIONS = {
    "torch": ("torch>=2.4.1", "torch_directml"),
    "onnx": ("onnx>=1.17,<2", "onnxruntime>=1.21,<2"),
}
"""Accepted versions of what a provider computes with."""


def probe() -> list[DeviceInfo]:
    """Return the devices of the provider, ``INL_DIRECTML_PROVIDER``.

    Raises :class:`BackendUnavailable`, with the reason, where there is none.
    """
    target = provider()
    if target == "torch":
        devices = adapters_of_torch()
    else:
        devices = adapters() if target in ("dml", "winml") else stand_in(target)
    check_installed(target)
    if target in ("winml", "torch"):
        return [info_on(info, target) for info in devices]
    return devices


def adapters() -> list[DeviceInfo]:
    """Return the display adapters of Windows."""
    if PLATFORM != "win32":
        raise BackendUnavailable(
            f"no DirectX 12: {reason_without_windows()}; {VARIABLE}=webgpu runs the "
            f"code on Vulkan, {VARIABLE}=cpu on the CPU"
        )
    found = [
        DeviceInfo(index, name, memory)
        for index, (name, memory) in enumerate(registered())
    ]
    if not found:
        raise BackendUnavailable("no DirectX 12: Windows lists no display adapter")
    return found


def adapters_of_torch() -> list[DeviceInfo]:
    """Return the adapters for torch-directml: in WSL one without a name."""
    if PLATFORM == "linux" and WSL.exists():
        return [DeviceInfo(0, "DirectX 12 GPU of WSL")]
    return adapters()


def reason_without_windows() -> str:
    """Return why a system other than Windows has no DirectML."""
    if WSL.exists():
        return (
            f"ONNX Runtime has DirectML in its wheels for Windows only, and this is "
            f"WSL ({WSL}); use the Python of Windows, or {VARIABLE}=torch"
        )
    return f"it is part of Windows, and this is {PLATFORM} without {WSL}"


def registered() -> Iterator[tuple[str, int | None]]:
    """Yield name and memory of each display adapter in the registry of Windows."""
    import winreg

    registry: Any = winreg
    with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, ADAPTERS) as parent:
        for number in range(registry.QueryInfoKey(parent)[0]):
            name = registry.EnumKey(parent, number)
            if not name.isdigit():
                continue
            with registry.OpenKey(parent, name) as key:
                memory = _entry(registry, key, MEMORY)
                driver = str(_entry(registry, key, DRIVER) or "display adapter")
            yield driver, memory if isinstance(memory, int) else None


def _entry(registry: Any, key: Any, name: str) -> Any:
    try:
        return registry.QueryValueEx(key, name)[0]
    except OSError:
        return None


def stand_in(target: str) -> list[DeviceInfo]:
    """Return the device of a provider that is not DirectML, which runs its code."""
    if target == "webgpu" and PLATFORM == "linux":
        try:
            ctypes.CDLL(LOADER)
        except OSError as error:
            raise BackendUnavailable(
                f"{VARIABLE}=webgpu: no Vulkan: {error}. Try: apt-get install "
                "libvulkan1 mesa-vulkan-drivers, or the driver of the GPU"
            ) from error
    return [info_on(DeviceInfo(0, ""), target)]


def info_on(info: DeviceInfo, target: str) -> DeviceInfo:
    """Return the row of a device that another provider than DirectML computes on."""
    name = f"directml code on {target}" + (info.name and f": {info.name}")
    note = f"set by {VARIABLE}"
    return DeviceInfo(info.index, name, info.memory_bytes, note)


def check_installed(target: str) -> None:
    """Raise :class:`BackendUnavailable` if a package of the provider is missing, is of
    another version, or cannot be imported.
    """
    needed = MODULES[target] if target == "torch" else ("onnx", *MODULES[target])
    require_modules(needed, INSTALL[target])
    if target == "dml" and installed_version("onnxruntime-directml") is None:
        raise BackendUnavailable(
            "onnxruntime-directml (another build of onnxruntime is) not installed. "
            f"Try: {INSTALL[target]}"
        )
    for requirement in VERSIONS["torch" if target == "torch" else "onnx"]:
        require_framework(requirement, INSTALL[target])
