"""The library's base class as a backend of its own, on the CPU provider."""

from __future__ import annotations

from inl.backend.base import Traits
from inl.device import Device
from inl_onnx.backend import OnnxBackend
from inl_onnx.runtime import Provider, Runtime

CPU = Provider("cpu", lambda _: ["CPUExecutionProvider"])


class OnnxCpu(OnnxBackend):
    traits = Traits(dtypes=("float32", "float16"), block_size=32)

    def __init__(self, provider=CPU):
        self.device = Device("onnx:0")
        self.runtime = Runtime(provider)
