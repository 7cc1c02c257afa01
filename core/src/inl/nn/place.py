"""A device that tensors are on: its backend, ops and array module."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.dtypes import widen, wrap
from inl.functional.arrays import ArrayModule, module_of
from inl.ops.linear import Linear
from inl.plugin import choose_device, make_backend, registry
from inl.spec.dispatch import DynamicOps
from inl.spec.selection import KernelSelection

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

    def array(self, values: NDArray[Any]) -> Any:
        """Copy a host array to the device."""
        return self.backend.tensor(wrap(np.array(values, order="C")))

    def numpy(self, array: Any) -> NDArray[Any]:
        """Copy an array to the host."""
        return widen(self.backend.numpy(array))

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
