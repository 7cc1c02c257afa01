"""Order, shapes and places of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl_toolkit.nn.base import TensorBase
    from inl_toolkit.nn.place import Place

Gradient = Callable[[Any], Any]
"""Gradient of the result -> gradient of one operand, as arrays of the device."""


MOST_ROUNDS = 8
"""Repetitions of an index up to which its gradients are added on the device."""


def topological(last: TensorBase) -> list[TensorBase]:
    """List the tensors that ``last`` depends on, operands first."""
    order: list[TensorBase] = []
    seen: set[int] = set()
    stack: list[tuple[TensorBase, bool]] = [(last, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node._edges]
    return order


def unbroadcast(operand: TensorBase) -> Gradient:
    """Sum a gradient over the axes along which the operand was broadcast."""
    shape, xp = operand.shape, operand.place.xp

    def pull(g: Any) -> Any:
        extra = len(g.shape) - len(shape)
        axes = [*range(extra)] + [
            extra + i for i, n in enumerate(shape) if n == 1 != g.shape[extra + i]
        ]
        return xp.reshape(xp.sum(g, axis=tuple(axes)) if axes else g, shape)

    return pull


def scatter(place: Place, flat: NDArray[Any], shape: tuple[int, ...]) -> Gradient:
    """Return the gradient of ``x.reshape(-1)[flat]``, for ``x`` of a shape.

    flat: positions on the host. Each round gathers one use of every element, so that
    positions without repetition take one; more than :data:`MOST_ROUNDS` are added on
    the host.
    """
    size, count = math.prod(shape), len(flat)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    use = np.arange(count) - np.searchsorted(ordered, ordered)

    def gathered(g: Any) -> Any:
        xp = place.xp
        zero = place.array(np.zeros(1, np.float32))
        padded = xp.concatenate([xp.reshape(g, (count,)), zero], axis=0)
        total: Any = 0
        for this in range(int(use.max(initial=0)) + 1):
            index = np.full(size, count, np.int32)
            index[ordered[use == this]] = order[use == this]
            total = total + xp.take(padded, place.array(index), axis=0)
        return xp.reshape(total, shape)

    def added(g: Any) -> Any:
        values = place.numpy(g).reshape(-1)
        total = np.bincount(flat, values, size).astype(np.float32)
        return place.array(total.reshape(shape))

    return gathered if use.max(initial=0) < MOST_ROUNDS else added
