"""One device of OpenVINO: compiles graphs and allocates their caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset15 as opset

from inl.errors import BackendUnavailable, DeviceError, OutOfMemory
from inl_intel.openvino.compiled import lines
from inl_intel.openvino.graph import Graph, Value

THREADS: Final = "INL_THREADS"
"""Environment variable: threads of the CPU device; OpenVINO decides if it is unset."""

TYPES: Final = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

CAPABILITIES: Final = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
"""Compute dtype -> OpenVINO's name for devices that have instructions for it."""


@cache
def core() -> ov.Core:
    """Return OpenVINO's registry of devices."""
    return ov.Core()


class Runtime:
    """A device by OpenVINO's name, such as "CPU" or "GPU.1", in one compute dtype.

    dtype: the first of :attr:`dtypes` by default, which is float32 but on NPUs.
    Raises :class:`BackendUnavailable` where OpenVINO has no such device.
    """

    def __init__(self, name: str, dtype: str = "") -> None:
        self.name = name
        self.kind = name.partition(".")[0]
        found = core().available_devices
        if name not in found and f"{name}.0" not in found:
            raise BackendUnavailable(
                f"OpenVINO {ov.__version__} finds no device {name}: found "
                f"{', '.join(found) or 'none'}; is its driver installed?"
            )
        self.dtype = dtype or self.dtypes[0]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Compute dtypes of the device, float32 first."""
        served = core().get_property(self.name, "OPTIMIZATION_CAPABILITIES")
        found = (dtype for dtype, name in CAPABILITIES.items() if name in served)
        return tuple(found) or ("float32",)

    def settings(self) -> dict[str, Any]:
        """Return the properties that graphs are compiled with."""
        kind = TYPES[self.dtype]
        found: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
        if self.kind != "NPU":  # it computes in float16
            found["INFERENCE_PRECISION_HINT"] = kind
        if self.kind != "CPU":
            return found
        found["KV_CACHE_PRECISION"] = kind
        if self.dtype == "float32":
            # Otherwise inputs of products with compressed weights are rounded to int8.
            found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        if threads := os.environ.get(THREADS):
            if not threads.isascii() or not threads.isdigit() or not int(threads):
                raise DeviceError(
                    f"environment variable {THREADS}: found {threads!r:.80}, accepted: "
                    "a whole number from 1"
                )
            found["INFERENCE_NUM_THREADS"] = int(threads)
        return found

    def compile(self, graph: Graph, result: Value) -> Any:
        """Return the compiled graph; inputs that no node reads are left out.

        Raises :class:`BackendUnavailable` for a graph that the device refuses.
        """
        results = [opset.result(each) for each in (result.output, *graph.results)]
        nodes = graph.inputs.values()
        used = [node for node in nodes if node.output(0).get_target_inputs()]
        model = ov.Model(results, used, "inl")
        try:
            return core().compile_model(model, self.name, self.settings())
        except RuntimeError as error:
            raise BackendUnavailable(
                f"OpenVINO {ov.__version__}: device {self.name} does not compile the "
                f"model: {'; '.join(lines(error)[-2:])}"
            ) from error

    def zeros(self, shape: Sequence[int], kind: Any) -> Any:
        """Allocate a zeroed tensor in host memory.

        Raises :class:`~inl.errors.OutOfMemory`.
        """
        try:
            if kind == ov.Type.f32:
                # The system provides these pages when they are written.
                return ov.Tensor(np.zeros(shape, np.float32), shared_memory=True)
            made = ov.Tensor(kind, ov.Shape(list(shape)))
            made.data[...] = 0
        except (MemoryError, RuntimeError, ValueError) as error:
            raise OutOfMemory(
                f"OpenVINO's device {self.name}: cache of {list(shape)} {kind}: {error}"
            ) from error
        return made
