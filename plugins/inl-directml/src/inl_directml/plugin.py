"""Entry point ``directml``: registers backend and probe without importing them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from inl.device import DeviceType
from inl.plugin import hookimpl
from inl_directml.settings import VARIABLE

if TYPE_CHECKING:
    from inl.plugin.hooks import RegisterBackend


ONNX = "inl_directml.backend:DirectmlBackend"
TORCH = "inl_directml.legacy.backend:TorchDirectmlBackend"


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    register(
        DeviceType.DIRECTML,
        TORCH if os.environ.get(VARIABLE) == "torch" else ONNX,
        probe="inl_directml.probe:probe",
    )
