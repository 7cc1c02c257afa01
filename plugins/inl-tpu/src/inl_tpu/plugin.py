"""Entry point ``tpu``: registers the backend and its probe without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend

INL_FEATURES = {"hosts"}


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(
        DeviceType.TPU, "inl_tpu.backend:TpuBackend", probe="inl_tpu.probe:probe",
        hosts="inl_tpu.backend:open_host",
    )  # fmt: skip
