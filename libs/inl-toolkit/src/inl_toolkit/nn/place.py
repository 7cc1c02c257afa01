"""A device that tensors are on: its backend, ops and array module."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import widen, wrap
from inl.ops.linear import Linear
from inl.plugin import choose_device, make_backend, registry
from inl.spec.dispatch import DynamicOps
from inl.spec.selection import KernelSelection
from inl_toolkit.functional.arrays import ArrayModule, cast, module_of

DTYPES = ("float32", "int32", "bool")
"""Dtypes of tensors: numbers, indices, and results of comparisons."""

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.device import Device


class Place:
    """One open device; arrays are those of its backend."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.backend = make_backend(device)
        kernels = (*self.backend.kernels(), *registry().kernels(device.type))
        self.ops = DynamicOps(KernelSelection(kernels, device_name=str(device)))
        probe = self.array(np.zeros(1, np.float32))
        self.xp: ArrayModule = module_of(f"Tensor on {device}", "data", probe)
        self._dtypes = {
            "float32": probe.dtype,
            "int32": self.array(np.zeros(1, np.int32)).dtype,
            "bool": (probe > 0).dtype,
        }

    def array(self, values: NDArray[Any]) -> Any:
        """Copy a host array to the device; bool is converted there."""
        if values.dtype == bool:
            return self.array(values.astype(np.int32)) != 0
        return self.backend.tensor(wrap(np.array(values, order="C")))

    def numpy(self, array: Any) -> NDArray[Any]:
        """Copy an array to the host."""
        if array.dtype == self._dtypes["bool"]:
            return self.numpy(self.cast(array, "int32")).astype(bool)
        return widen(self.backend.numpy(array))

    def cast(self, array: Any, dtype: str) -> Any:
        """Convert an array to one of :data:`DTYPES`."""
        return cast(array, self._dtypes[dtype])

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """``x`` [M, K] @ ``weight`` [N, K].T + ``bias``, with the op of the catalog."""
        return self.ops.linear(x, Linear(weight, bias))


@cache
def place_of(device: Device) -> Place:
    """Return the open device; raises :class:`~inl.errors.DeviceError` without one."""
    return Place(device)


def default_device() -> Device:
    """Return the device that "auto" selects."""
    return choose_device("auto")
