"""Entry point ``rocm``: registers the backend and its probe without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(
        DeviceType.ROCM, "inl_rocm.backend:RocmBackend", probe="inl_rocm.probe:probe"
    )
