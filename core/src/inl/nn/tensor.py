"""Tensors on any device, with gradients by reverse-mode differentiation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from inl.device import Device
from inl.errors import RequestError
from inl.nn.checks import check_broadcast, host_array
from inl.nn.gradients import Gradient, kept, topological, unbroadcast
from inl.nn.place import Place, default_device, place_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

Number = float | int

DTYPES = ("float32", "int32")
"""Dtypes of tensors: numbers, and indices."""


@final
class Tensor:
    """An array on one device.

    data: nested sequences of numbers, or an array that NumPy reads. device: a
    :class:`~inl.Device` or its name; by default the one that "auto" selects. dtype:
    "float32", or "int32" for indices. requires_grad: whether :meth:`backward` sets
    :attr:`grad`. Raises :class:`~inl.errors.DeviceError` where the device cannot be
    used, and :class:`RequestError` for data that are not numbers.
    """

    __array_ufunc__ = None
    """NumPy leaves ``array + tensor`` to the tensor."""
    __slots__ = ("_edges", "array", "device", "dtype", "grad", "requires_grad")

    def __init__(
        self,
        data: Any,
        device: Device | str | None = None,
        *,
        dtype: str = "float32",
        requires_grad: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise RequestError(
                f"Tensor: dtype: found {dtype!r:.80}, accepted: {', '.join(DTYPES)}"
            )
        chosen = Device(device) if isinstance(device, str) else device
        self.device = chosen or default_device()
        self.dtype = dtype
        self.array = self.place.array(host_array(data, dtype))
        self.requires_grad = requires_grad
        self.grad: Tensor | None = None
        self._edges: tuple[tuple[Tensor, Gradient], ...] = ()

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

    def numpy(self) -> NDArray[Any]:
        """Copy to the host."""
        return self.place.numpy(self.array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numpy(), dtype)

    def __float__(self) -> float:
        return self.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def item(self) -> float:
        """Return the only element; raises :class:`RequestError` if there are more."""
        if math.prod(self.shape) != 1:
            raise RequestError(
                f"Tensor.item: found shape {list(self.shape)}, accepted: one element"
            )
        return float(self.numpy().reshape(()))

    def to(self, device: Device | str) -> Tensor:
        """Copy to another device; gradients flow back."""
        target = Device(device) if isinstance(device, str) else device
        if target == self.device:
            return self
        source, there = self.place, place_of(target)
        moved = there.array(self.numpy())
        back = [(self, lambda g: source.array(there.numpy(g)))]
        return result(moved, target, self.dtype, back)

    def detach(self) -> Tensor:
        """Return the same array without a gradient."""
        return result(self.array, self.device, self.dtype, ())

    def backward(self) -> None:
        """Add the gradient of this one number to ``grad`` of every tensor it needs.

        Raises :class:`RequestError` for more than one element, or without gradients.
        """
        if math.prod(self.shape) != 1 or not self.requires_grad:
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
        self.grad = result(total, self.device, self.dtype, ())

    def __add__(self, other: Tensor | Number) -> Tensor:
        other = self._operand(other)
        edges = [(self, unbroadcast(self)), (other, unbroadcast(other))]
        return self._result(self.array + other.array, edges)

    def __mul__(self, other: Tensor | Number) -> Tensor:
        other = self._operand(other)
        mine, theirs = unbroadcast(self), unbroadcast(other)
        a, b = self.array, other.array
        edges = [(self, lambda g: mine(g * b)), (other, lambda g: theirs(g * a))]
        return self._result(a * b, edges)

    def __pow__(self, exponent: Number) -> Tensor:
        x = self.array
        edges = [(self, lambda g: g * (exponent * x ** (exponent - 1)))]
        return self._result(x**exponent, edges)

    def __neg__(self) -> Tensor:
        return self * -1.0

    def __sub__(self, other: Tensor | Number) -> Tensor:
        return self + (-other)

    def __rsub__(self, other: Number) -> Tensor:
        return -self + other

    def __truediv__(self, other: Tensor | Number) -> Tensor:
        return self * self._operand(other) ** -1

    def __rtruediv__(self, other: Number) -> Tensor:
        return self**-1 * other

    __radd__ = __add__
    __rmul__ = __mul__

    def __matmul__(self, other: Any) -> Tensor:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul(other, self)

    def exp(self) -> Tensor:
        """Exponential, elementwise."""
        y = self.place.xp.exp(self.array)
        return self._result(y, [(self, lambda g: g * y)])

    def log(self) -> Tensor:
        """Natural logarithm, elementwise."""
        x = self.array
        return self._result(self.place.xp.log(x), [(self, lambda g: g / x)])

    def tanh(self) -> Tensor:
        """Hyperbolic tangent, elementwise."""
        y = self.place.xp.tanh(self.array)
        return self._result(y, [(self, lambda g: g * (1 - y * y))])

    def relu(self) -> Tensor:
        """``max(x, 0)``, elementwise."""
        xp, x = self.place.xp, self.array
        zero = xp.zeros_like(x)
        edges = [(self, lambda g: xp.where(x > 0, g, zero))]
        return self._result(xp.maximum(x, 0.0), edges)

    def sum(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        """Sum over one axis, or all."""
        xp, shape = self.place.xp, self.shape
        whole = kept(shape, axis)

        def pull(g: Any) -> Any:
            return xp.broadcast_to(xp.reshape(g, whole), shape)

        summed = xp.sum(self.array, axis=axis, keepdims=keepdims)
        return self._result(summed, [(self, pull)])

    def mean(self, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        """Average over one axis, or all."""
        count = math.prod(self.shape) if axis is None else self.shape[axis]
        return self.sum(axis, keepdims=keepdims) * (1 / count)

    def reshape(self, *shape: Any) -> Tensor:
        """Return the same elements in another shape, whose sizes may be one tuple."""
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        xp, before = self.place.xp, self.shape
        edges = [(self, lambda g: xp.reshape(g, before))]
        return self._result(xp.reshape(self.array, shape), edges)

    @property
    def T(self) -> Tensor:  # noqa: N802 - NumPy's name
        """The tensor with its last two axes exchanged."""
        xp = self.place.xp
        edges = [(self, lambda g: xp.swapaxes(g, -1, -2))]
        return self._result(xp.swapaxes(self.array, -1, -2), edges)

    def _operand(self, other: Any) -> Tensor:
        """Return a tensor that broadcasts with this one."""
        found = self._tensor(other)
        check_broadcast(self.shape, found.shape)
        return found

    def _tensor(self, other: Any) -> Tensor:
        """Return ``other`` as a tensor of this device."""
        if isinstance(other, Tensor):
            return self._beside(other)
        return Tensor(other, self.device)

    def _beside(self, other: Tensor) -> Tensor:
        """Return ``other``; raises if it is on another device."""
        if other.device != self.device:
            raise RequestError(
                f"Tensor: found operands on {self.device} and {other.device}, "
                "accepted: one device; move one with .to(device)"
            )
        return other

    def _result(self, array: Any, edges: Sequence[tuple[Tensor, Gradient]]) -> Tensor:
        return result(array, self.device, self.dtype, edges)

    def __repr__(self) -> str:
        return f"Tensor({np.array2string(self.numpy())}, device={self.device})"


def result(
    array: Any, device: Device, dtype: str, edges: Sequence[tuple[Tensor, Gradient]]
) -> Tensor:
    """Return a tensor of an array of the device; edges: operands and gradients."""
    tensor = object.__new__(Tensor)
    tensor.array, tensor.device, tensor.dtype = array, device, dtype
    tensor.grad = None
    tensor._edges = tuple(edge for edge in edges if edge[0].requires_grad)
    tensor.requires_grad = bool(tensor._edges)
    return tensor


def matmul(a: Any, b: Any) -> Tensor:
    """Product of ``a`` [..., K] and ``b`` [K, N]: [..., N].

    Computed by the op ``linear``. What is no tensor becomes one of the other's device.
    Raises :class:`RequestError` for other shapes and for
    operands on two devices.
    """
    if not isinstance(a, Tensor):
        a = b._tensor(a) if isinstance(b, Tensor) else Tensor(a)
    b = a._tensor(b)
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise RequestError(
            f"matmul: found {list(a.shape)} and {list(b.shape)}, accepted: [..., K] "
            "and [K, N]"
        )
    return linear(a, b.T)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., K] @ ``weight`` [N, K].T + ``bias`` [N]: [..., N]."""
    place, xp = x.place, x.place.xp
    flat = xp.reshape(x.array, (-1, x.shape[-1]))
    w, shape = weight.array, x.shape
    turn = xp.swapaxes

    def rows(g: Any) -> Any:
        return xp.reshape(g, (-1, w.shape[0]))

    def of_x(g: Any) -> Any:
        return xp.reshape(place.linear(rows(g), turn(w, 0, 1)), shape)

    def of_weight(g: Any) -> Any:
        return place.linear(turn(rows(g), 0, 1), turn(flat, 0, 1))

    edges: list[tuple[Tensor, Gradient]] = [(x, of_x), (x._beside(weight), of_weight)]
    if bias is not None:
        edges.append((x._beside(bias), lambda g: xp.sum(rows(g), axis=0)))
    y = place.linear(flat, w, None if bias is None else bias.array)
    return x._result(xp.reshape(y, (*shape[:-1], w.shape[0])), edges)
