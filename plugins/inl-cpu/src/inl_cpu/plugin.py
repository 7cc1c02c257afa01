"""Entry point ``cpu``: registers the backend and its probe without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend


INL_BUILD_KERNELS = "inl_cpu.build_kernels:build_kernels"


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(DeviceType.CPU, "inl_cpu.backend:open_cpu", probe="inl_cpu.probe:probe")
