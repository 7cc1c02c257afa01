"""Environment variables of the backends for Intel's devices; imports no framework."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from inl.errors import BackendUnavailable, DeviceError

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
    value = os.environ.get(KERNELS, "") or "triton"
    if value not in ACCEPTED:
        raise DeviceError(
            f"environment variable {KERNELS}: found {value!r:.80}, "
            f"accepted: {', '.join(ACCEPTED)}"
        )
    return value


def requested_runtime() -> str:
    """Read ``INL_XPU_RUNTIME``: "torch" if it is not set.

    Raises :class:`BackendUnavailable` for a value that is not one of :data:`RUNTIMES`.
    """
    value = os.environ.get(RUNTIME, "") or RUNTIMES[0]
    if value not in RUNTIMES:
        raise BackendUnavailable(
            f"environment variable {RUNTIME}: found {value!r:.80}, accepted: "
            f"{', '.join(RUNTIMES)}"
        )
    return value


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
