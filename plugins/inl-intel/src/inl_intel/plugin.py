"""Entry point ``intel``: registers the backend and its probe without importing them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl
from inl_intel.settings import RUNTIME

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend


TORCH = "inl_intel.backend:XpuBackend", "inl_intel.probe:probe"
OPENVINO = (
    "inl_intel.openvino.backend:OpenVinoBackend",
    "inl_intel.openvino.probe:probe",
)
"""Backend and probe."""


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    is_openvino = os.environ.get(RUNTIME, "").startswith("openvino")
    backend, probe = OPENVINO if is_openvino else TORCH
    register(DeviceType.XPU, backend, probe=probe)
