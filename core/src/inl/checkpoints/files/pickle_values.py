"""Objects in the pickle of ``torch.save``: storages, tensors and permitted calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""Storage classes of ``torch`` and their dtypes."""


class GlobalName(NamedTuple):
    """A global name in a pickle; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class TorchStorage(NamedTuple):
    """A typed storage, in the archive member ``data/KEY``."""

    dtype: str
    key: str
    size: int
    """Number of elements."""


class StoredTensor(NamedTuple):
    """Description of a tensor: a strided view of a storage."""

    storage: TorchStorage
    offset: int
    """Index of the first element in the storage."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""


def is_size(value: Any) -> bool:
    """Return whether a value is an integer from 0 to 2**48 - 1."""
    return type(value) is int and 0 <= value < 1 << 48


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or not all(map(is_size, values)):
        raise TypeError("sizes that are not integers from 0")
    return values


def _rebuild_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *_rest: Any
) -> StoredTensor:
    if type(storage) is not TorchStorage or not is_size(offset):
        raise TypeError("a tensor without storage")
    return StoredTensor(storage, offset, _sizes(shape), _sizes(strides))


def _rebuild_parameter(tensor: Any, *_rest: Any) -> StoredTensor:
    if type(tensor) is not StoredTensor:
        raise TypeError("a parameter that is not a tensor")
    return tensor


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    if items:
        raise TypeError("an ordered dict that is created with items")
    return {}


CALLS: Final[dict[GlobalName, Callable[..., Any]]] = {
    GlobalName("collections", "OrderedDict"): _ordered_dict,
    GlobalName("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    GlobalName("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
}
"""Permitted callables, and the functions that replace them."""
