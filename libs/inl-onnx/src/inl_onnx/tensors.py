"""Tensors on a device of ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import add, getitem, mul, sub
from typing import TYPE_CHECKING, Any

from inl.errors import DeviceError

if TYPE_CHECKING:
    from inl_onnx.runtime import Runtime


class Tensor:
    """An ``OrtValue`` and the runtime that computes with it.

    in_place: a program may write its result over it, because a repeated step would
    write the same values again; caches are. constant: it never changes, and a session
    may keep it in a form of its own; packed weights are.
    """

    __slots__ = (
        "__weakref__", "_value", "constant", "dtype", "in_place", "runtime", "shape",
    )  # fmt: skip
    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None

    def __init__(
        self,
        runtime: Runtime,
        value: Any,
        dtype: str,
        shape: tuple[int, ...],
        *,
        in_place: bool = False,
        constant: bool = False,
    ) -> None:
        self.runtime, self._value = runtime, value
        self.dtype, self.shape, self.in_place = dtype, shape, in_place
        self.constant = constant

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} on {self.runtime.provider.name}"

    @property
    def value(self) -> Any:
        """The ``OrtValue``; raises :class:`DeviceError` once a program consumed it."""
        if self._value is None:
            raise DeviceError(f"{self!r}: was consumed by a program")
        return self._value

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return int(self.value.tensor_size_in_bytes()) if math.prod(self.shape) else 0

    def consume(self) -> Any:
        """Return the value and forget it."""
        value, self._value = self.value, None
        return value

    def _call(self, function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        return self.runtime.evaluate(function, (self, *args), static)

    def __add__(self, other: Any) -> Any:
        return self._binary(add, other)

    def __sub__(self, other: Any) -> Any:
        return self._binary(sub, other)

    def __mul__(self, other: Any) -> Any:
        return self._binary(mul, other)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Any:
        return self._call(_rsub, other=other)

    def __getitem__(self, key: Any) -> Any:
        return self._call(_item, key=_Key(key))

    def reshape(self, *shape: Any) -> Any:
        """As NumPy's, with static sizes."""
        return self._call(_reshape, shape=shape)

    def _binary(self, function: Callable[..., Any], other: Any) -> Any:
        if isinstance(other, Tensor):
            return self._call(function, other)
        return self._call(_scalar, operator=function, other=other)


class _Key:
    """A subscript, hashable also where slices are not."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __hash__(self) -> int:
        return hash(repr(self.key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and repr(self.key) == repr(other.key)


def _scalar(x: Any, *, operator: Callable[..., Any], other: Any) -> Any:
    return operator(x, other)


def _rsub(x: Any, *, other: Any) -> Any:
    return other - x


def _item(x: Any, *, key: _Key) -> Any:
    return getitem(x, key.key)


def _reshape(x: Any, *, shape: tuple[Any, ...]) -> Any:
    return x.reshape(*shape)
