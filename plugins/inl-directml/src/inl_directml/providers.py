"""The execution providers of ONNX Runtime, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnxruntime as ort

from inl.errors import BackendUnavailable
from inl_onnx.runtime import Provider

if TYPE_CHECKING:
    from inl.device import Device


def open_provider(name: str, device: Device) -> Provider:
    return Provider("cpu", lambda _: ["CPUExecutionProvider"])
