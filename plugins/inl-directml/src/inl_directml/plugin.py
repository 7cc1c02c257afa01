"""Entry point ``directml``: registers backend and probe without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(
        DeviceType.DIRECTML,
        "inl_directml.backend:DirectmlBackend",
        probe="inl_directml.probe:probe",
    )
