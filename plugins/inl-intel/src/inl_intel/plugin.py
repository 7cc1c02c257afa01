"""Entry point ``intel``: registers the backend and its probe without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(
        DeviceType.XPU, "inl_intel.backend:XpuBackend", probe="inl_intel.probe:probe"
    )
