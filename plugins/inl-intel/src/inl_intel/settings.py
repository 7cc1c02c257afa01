"""Environment variables of the backends for Intel's devices; imports no framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inl.errors import BackendUnavailable
from inl.plugin.environment import environment_choice

if TYPE_CHECKING:
    from inl.device import Device

KERNELS: Final = "INL_XPU_KERNELS"
"""Environment variable: which kernels are used."""

ACCEPTED: Final = ("triton", "torch")

RUNTIME: Final = "INL_XPU_RUNTIME"
"""Environment variable: what computes on the device."""

RUNTIMES: Final = ("torch", "openvino-cpu", "openvino-gpu", "openvino-npu")
"""torch on Intel GPUs, or a device of OpenVINO."""


def requested_kernels() -> str:
    """Read ``INL_XPU_KERNELS``: "triton" (the default), or "torch" for torch's alone.

    Raises :class:`DeviceError` for any other value.
    """
    return environment_choice(KERNELS, ACCEPTED)


def requested_runtime() -> str:
    """Read ``INL_XPU_RUNTIME``: "torch" if it is not set.

    Raises :class:`BackendUnavailable` for a value that is not one of :data:`RUNTIMES`.
    """
    return environment_choice(RUNTIME, RUNTIMES, BackendUnavailable)


def openvino_device(device: Device) -> str:
    """Return OpenVINO's name of a device: "CPU", "NPU", "GPU.0", "GPU.1".

    Raises :class:`BackendUnavailable` if another runtime is set, or for a second CPU or
    NPU.
    """
    kind = requested_runtime().removeprefix("openvino-").upper()
    if kind == "GPU":
        return f"GPU.{device.index}"
    if kind == "TORCH" or device.index:
        raise BackendUnavailable(
            f"{device}: {RUNTIME} is {requested_runtime()!r}, which has no OpenVINO "
            f"device of index {device.index}"
        )
    return kind
