"""Entry point ``cuda``: names the backend and its probe, and imports neither."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(
        DeviceType.CUDA, "inl_cuda.startup:open_backend", probe="inl_cuda.probe:probe"
    )
