"""Conversion between host arrays and torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from inl.dtypes import E4M3, HostArray
from inl.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
    E4M3: torch.float8_e4m3fn,
}
"""Names of :mod:`inl.dtypes` -> torch dtypes."""

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
"""Torch dtypes -> names."""


BITS: Final = {"bfloat16": (np.int16, np.uint16), E4M3: (np.uint8, np.uint8)}
"""Dtypes that NumPy lacks -> those of their bits, in torch and in a host array."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name; raises :class:`DeviceError` if unknown."""
    if name not in DTYPES:
        raise DeviceError(f"dtype: found {name!r}, torch takes {', '.join(DTYPES)}")
    return DTYPES[name]


def from_host(array: HostArray) -> torch.Tensor:
    """Make a CPU tensor of a host array.

    A read-only array (a mapped file) is aliased, so the tensor must not be written to;
    a writable one is copied, since its owner may change it.
    """
    dtype = torch_dtype(array.dtype)
    data = array.data.reshape(array.shape)
    if array.dtype in BITS:
        data = data.view(BITS[array.dtype][0])
    if data.flags.writeable or not _is_plain(data):
        data = np.array(data, data.dtype.newbyteorder("="), order="C")
    else:
        data = np.asarray(_Aliased(data))
    tensor = torch.from_numpy(data)
    return tensor.view(dtype) if array.dtype in BITS else tensor


def aliased(array: HostArray) -> torch.Tensor:
    """Return a CPU tensor in the memory of a contiguous host array.

    Neither the tensor nor, while it is used, the array may be written to.
    """
    data = array.data.reshape(array.shape)
    if array.dtype in BITS:
        data = data.view(BITS[array.dtype][0])
    tensor = torch.from_numpy(np.asarray(_Aliased(data)))
    return tensor.view(torch_dtype(array.dtype)) if array.dtype in BITS else tensor


def to_host(tensor: torch.Tensor) -> HostArray:
    """Copy a tensor to the host; blocks until it is computed."""
    return host_array(tensor.detach().to("cpu", copy=True).contiguous())


def host_array(tensor: torch.Tensor) -> HostArray:
    """Return a contiguous CPU tensor as a host array in the same memory."""
    name, shape = NAMES[tensor.dtype], tuple(tensor.shape)
    if name in BITS:
        bits = tensor.view(torch_dtype(np.dtype(BITS[name][0]).name)).numpy()
        return HostArray(bits.view(BITS[name][1]), name, shape)
    return HostArray(tensor.numpy(), name, shape)


def _is_plain(data: NDArray[Any]) -> bool:
    return data.flags.c_contiguous and data.flags.aligned and data.dtype.isnative


class _Aliased:
    """Presents a read-only array as writable, to avoid torch's warning."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (address, False),
        }
