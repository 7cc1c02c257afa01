"""Opens the CPU backend: the native library if available, else torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl_cpu.selection import select_backend

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.device import Device


def open_cpu(device: Device) -> Backend:
    """Make the backend of the host.

    Raises as :func:`inl_cpu.selection.select_backend` does.
    """
    if select_backend().name == "native":
        from inl_cpu.native_backend import NativeBackend

        return NativeBackend(device)
    from inl_cpu.torch_backend import TorchCpuBackend

    return TorchCpuBackend(device)
