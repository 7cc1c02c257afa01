"""The execution providers of ONNX Runtime, by name.

A provider of a library of its own (WebGPU, those of Windows ML) is registered once and
selected by device; DirectML and the CPU are part of the runtime's wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from inl.errors import BackendUnavailable
from inl_directml.settings import INSTALL, VARIABLE
from inl_onnx.runtime import Provider

if TYPE_CHECKING:
    from inl.device import Device

CPU = "CPUExecutionProvider"
"""Computes what another provider has no kernel for, such as sums of int64."""


def open_provider(name: str, device: Device) -> Provider:
    """Return a provider for a device.

    Raises :class:`BackendUnavailable` with the reason that ONNX Runtime gives.
    """
    try:
        return OPEN[name](device)
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise unavailable(name, device, reason) from error


def unavailable(name: str, device: Device, reason: str) -> BackendUnavailable:
    """Return the error for a provider that cannot be used."""
    return BackendUnavailable(
        f"{device}: ONNX Runtime {ort.__version__}, provider {name}: {reason}; try: "
        f"{INSTALL[name]}, or select another provider by {VARIABLE}"
    )


def cpu(device: Device) -> Provider:
    if device.index:
        raise unavailable("cpu", device, "there is one CPU, of index 0")
    return Provider("cpu", lambda _: [CPU])


def dml(device: Device) -> Provider:
    name = "DmlExecutionProvider"
    if name not in ort.get_available_providers():
        raise unavailable("dml", device, "this build of the runtime lacks DirectML")

    def configure(options: ort.SessionOptions) -> Sequence[Any]:
        # Both are required by this provider.
        options.enable_mem_pattern = False
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        return [(name, {"device_id": str(device.index)}), CPU]

    # Whether its ScatterND may write over its input is not documented.
    return Provider("dml", configure, "dml", device.index, in_place=False)


def webgpu(device: Device) -> Provider:
    import onnxruntime_ep_webgpu as plugin

    register("webgpu", plugin.get_library_path())
    found = [d for d in ort.get_ep_devices() if d.ep_name == plugin.get_ep_name()]
    if device.index >= len(found):
        raise unavailable(
            "webgpu",
            device,
            f"{len(found)} devices found; ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 "
            "allows a Vulkan driver that computes on the CPU",
        )
    return Provider("webgpu", selecting(found[device.index]), "webgpu", device.index)


def winml(device: Device) -> Provider:
    from winui3.microsoft.windows.ai import machinelearning

    catalog = machinelearning.ExecutionProviderCatalog.get_default()
    for provider in catalog.find_all_providers():
        provider.ensure_ready_async().get()
        register(provider.name, provider.library_path)
    kinds = ort.OrtHardwareDeviceType
    accelerators = kinds.GPU, kinds.NPU
    found = [d for d in ort.get_ep_devices() if d.device.type in accelerators]
    if device.index >= len(found):
        raise unavailable("winml", device, f"{len(found)} GPUs and NPUs found")
    # Tensors stay in host memory: each provider has an allocator of its own.
    return Provider("winml", selecting(found[device.index]), in_place=False)


def selecting(found: Any) -> Callable[[ort.SessionOptions], Sequence[Any]]:
    """Return the configuration of sessions that use one device of a library."""

    def configure(options: ort.SessionOptions) -> Sequence[Any]:
        options.add_provider_for_devices([found], {})
        return []

    return configure


def register(name: str, path: str) -> None:
    """Load a provider's library, once per process."""
    if name not in _REGISTERED:
        ort.register_execution_provider_library(name, path)
        _REGISTERED.add(name)


_REGISTERED: set[str] = set()
OPEN = {"dml": dml, "winml": winml, "webgpu": webgpu, "cpu": cpu}
