"""Tensors on any device, with gradients by reverse-mode differentiation."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, final

from inl.errors import RequestError
from inl_toolkit.functional.out_of_memory import translating, translating_methods
from inl_toolkit.nn.checks import broadcast_shape
from inl_toolkit.nn.gradients import Gradient
from inl_toolkit.nn.views import Views


@translating_methods
@final
class Tensor(Views):
    """An array on one device.

    data: nested sequences of numbers, or an array that NumPy reads. device: a
    :class:`~inl.Device` or its name; by default the one that "auto" selects. dtype:
    "float32", "int32" for indices or "bool". requires_grad: whether :meth:`backward`
    sets :attr:`grad`, of float32 only. Raises :class:`~inl.errors.DeviceError` where
    the device cannot be used, and :class:`RequestError` for data that are not numbers.

    An operation on integers and floats is float32, on bool an int32.
    """

    __slots__ = ()
    grad: Tensor | None

    def __matmul__(self, other: Any) -> Tensor:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return matmul(other, self)


@translating
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


@translating
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


@translating
def where(condition: Tensor, x: Any, y: Any) -> Tensor:
    """Return ``x`` where ``condition``, of bool, is true, and ``y`` elsewhere.

    x, y: tensors or numbers, which broadcast with the condition.
    """
    if not isinstance(condition, Tensor) or condition.dtype != "bool":
        raise RequestError(
            f"where: condition: found {getattr(condition, 'dtype', condition)!r:.80}, "
            "accepted: a tensor of bool"
        )
    first, second = condition._tensor(x), condition._tensor(y)
    shape = broadcast_shape(first.shape, second.shape, condition.shape)
    return first.broadcast_to(shape)._select(~condition.broadcast_to(shape), second)


@translating
def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors of one dtype along an axis; their other sizes are equal."""
    first, *others = _listed("concatenate", tensors)
    ((at,), _), place = first._axes(axis), first.place
    rest = [n for i, n in enumerate(first.shape) if i != at]
    for other in others:
        alike = [n for i, n in enumerate(other.shape) if i != at]
        if alike != rest or other.ndim != first.ndim or other.dtype != first.dtype:
            raise RequestError(
                f"concatenate: found {list(first.shape)} of {first.dtype} and "
                f"{list(other.shape)} of {other.dtype}, accepted: shapes that differ "
                f"along axis {axis} only, and one dtype"
            )
    edges: list[tuple[Tensor, Gradient]] = []
    start = 0
    for tensor in (first, *others):
        stop = start + tensor.shape[at]
        key = (*[slice(None)] * at, slice(start, stop))
        edges.append((first._beside(tensor), itemgetter(key)))
        start = stop
    arrays = [tensor.array for tensor in (first, *others)]
    return first._result(place.xp.concatenate(arrays, axis=at), edges)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors of one shape and dtype along a new axis."""
    listed = _listed("stack", tensors)
    if len({tensor.shape for tensor in listed}) > 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in listed)
        raise RequestError(f"stack: found {shapes:.200}, accepted: one shape")
    return concatenate([tensor.unsqueeze(axis) for tensor in listed], axis)


def _listed(where: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    found = list(tensors)
    if not found or not all(isinstance(each, Tensor) for each in found):
        kinds = [type(each).__name__ for each in found]
        raise RequestError(
            f"{where}: found {kinds!r:.80}, accepted: one tensor or more"
        )
    return found
