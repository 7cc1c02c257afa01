"""Opens the CPU: the native library where it is there, else torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl_cpu.choice import choose

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.device import Device


def open_cpu(device: Device) -> Backend:
    """Make the backend of the host; raises as :func:`inl_cpu.choice.choose` does."""
    if choose().name == "native":
        from inl_cpu.native_backend import NativeBackend

        return NativeBackend(device)
    from inl_cpu.torch_backend import TorchCpuBackend

    return TorchCpuBackend(device)
