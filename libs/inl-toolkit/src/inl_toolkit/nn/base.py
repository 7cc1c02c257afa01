"""What every tensor has: an array on one device, a dtype and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from inl.device import Device
from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating_methods
from inl_toolkit.nn.checks import broadcast_shape, host_array
from inl_toolkit.nn.gradients import Gradient, topological
from inl_toolkit.nn.place import DTYPES, Place, default_device, place_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Number = float | int


@translating_methods
class TensorBase:
    """Base of :class:`~inl.nn.Tensor`, which documents the arguments."""

    __array_ufunc__ = None
    """NumPy leaves ``array + tensor`` to the tensor."""
    __slots__ = ("_edges", "array", "device", "dtype", "grad", "requires_grad")

    grad: Any

    def __init__(
        self,
        data: Any,
        device: Device | str | None = None,
        *,
        dtype: str = "float32",
        requires_grad: bool = False,
    ) -> None:
        check_dtype(dtype)
        if requires_grad and dtype != "float32":
            raise RequestError(
                f"Tensor: requires_grad: found {dtype}, accepted: float32"
            )
        chosen = Device(device) if isinstance(device, str) else device
        self.device = chosen or default_device()
        self.dtype = dtype
        self.array = self.place.array(host_array(data, dtype))
        self.requires_grad = requires_grad
        self.grad = None
        self._edges: tuple[tuple[TensorBase, Gradient], ...] = ()

    @property
    def place(self) -> Place:
        """The open device."""
        return place_of(self.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def numpy(self) -> NDArray[Any]:
        """Copy to the host."""
        return self.place.numpy(self.array)

    def tolist(self) -> Any:
        """Return the elements as nested lists of Python numbers."""
        return self.numpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numpy(), dtype)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def item(self) -> float:
        """Return the only element; raises :class:`RequestError` if there are more.

        A float, or an int or bool of a tensor with this dtype.
        """
        if self.size != 1:
            raise RequestError(
                f"Tensor.item: found shape {list(self.shape)}, accepted: one element"
            )
        value: float = self.numpy().reshape(()).item()
        return value

    def to(self, device: Device | str) -> Self:
        """Copy to another device; gradients flow back."""
        target = Device(device) if isinstance(device, str) else device
        if target == self.device:
            return self
        source, there = self.place, place_of(target)
        moved = self._result(
            there.array(self.numpy()),
            [(self, lambda g: source.array(there.numpy(g)))],
        )
        moved.device = target
        return moved

    def astype(self, dtype: str) -> Self:
        """Convert to "float32", "int32" or "bool"; integers have no gradient."""
        check_dtype(dtype)
        if dtype == self.dtype:
            return self
        return self._result(self.place.cast(self.array, dtype), (), dtype)

    def detach(self) -> Self:
        """Return the same array without a gradient."""
        return self._result(self.array, ())

    def copy(self) -> Self:
        """Return another array with the same elements; gradients flow back."""
        return self._result(self.array + 0, [(self, lambda g: g)])

    def backward(self) -> None:
        """Add the gradient of this one number to ``grad`` of every tensor it needs.

        Raises :class:`RequestError` for more than one element, or without gradients.
        """
        if self.size != 1 or not self.requires_grad:
            raise RequestError(
                f"Tensor.backward: found shape {list(self.shape)}, requires_grad="
                f"{self.requires_grad}; accepted: one number that requires a gradient"
            )
        gradients = {id(self): self.place.xp.ones_like(self.array)}
        for node in reversed(topological(self)):
            gradient = gradients.pop(id(node))
            if not node._edges:
                node._accumulate(gradient)
            for parent, pull in node._edges:
                part, key = pull(gradient), id(parent)
                gradients[key] = gradients[key] + part if key in gradients else part

    def _accumulate(self, gradient: Any) -> None:
        total = gradient if self.grad is None else self.grad.array + gradient
        self.grad = self._result(total, ())

    def _operands(self, other: Any) -> tuple[Self, Self]:
        """Return both operands, which broadcast, in the wider of their dtypes."""
        found = self._tensor(other)
        broadcast_shape(self.shape, found.shape)
        is_float = "float32" in (self.dtype, found.dtype)
        dtype = "float32" if is_float else "int32"
        return self.astype(dtype), found.astype(dtype)

    def _tensor(self, other: Any) -> Self:
        """Return ``other`` as a tensor of this device.

        Integers beside a tensor of integers are int32, all other numbers float32.
        """
        if isinstance(other, TensorBase):
            return self._beside(other)
        beside = self.dtype != "float32" and np.asarray(other).dtype.kind in "bui"
        return type(self)(other, self.device, dtype="int32" if beside else "float32")

    def _beside(self, other: Any) -> Self:
        """Return ``other``; raises if it is on another device."""
        if other.device != self.device:
            raise RequestError(
                f"Tensor: found operands on {self.device} and {other.device}, "
                "accepted: one device; move one with .to(device)"
            )
        same: Self = other
        return same

    def _result(
        self,
        array: Any,
        edges: Sequence[tuple[TensorBase, Gradient]],
        dtype: str | None = None,
    ) -> Self:
        """Return a tensor of an array of this device; edges: operands and gradients."""
        tensor = object.__new__(type(self))
        tensor.array, tensor.device = array, self.device
        tensor.dtype = dtype or self.dtype
        tensor.grad = None
        tensor._edges = tuple(edge for edge in edges if edge[0].requires_grad)
        tensor.requires_grad = bool(tensor._edges)
        return tensor

    def __repr__(self) -> str:
        return f"Tensor({np.array2string(self.numpy())}, device={self.device})"


def check_dtype(dtype: str) -> None:
    """Raise :class:`RequestError` for a dtype that tensors do not have."""
    if dtype not in DTYPES:
        raise RequestError(
            f"Tensor: dtype: found {dtype!r:.80}, accepted: {', '.join(DTYPES)}"
        )
