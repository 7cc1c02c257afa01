"""Order and shapes of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.nn.tensor import Tensor

Gradient = Callable[[Any], Any]
"""Gradient of the result -> gradient of one operand, as arrays of the device."""


def topological(last: Tensor) -> list[Tensor]:
    """List the tensors that ``last`` depends on, operands first."""
    order: list[Tensor] = []
    seen: set[int] = set()
    stack = [(last, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack += [(parent, False) for parent, _ in node._edges]
    return order


def unbroadcast(operand: Tensor) -> Gradient:
    """Sum a gradient over the axes along which the operand was broadcast."""
    shape, xp = operand.shape, operand.place.xp

    def pull(g: Any) -> Any:
        extra = len(g.shape) - len(shape)
        axes = [*range(extra)] + [
            extra + i for i, n in enumerate(shape) if n == 1 != g.shape[extra + i]
        ]
        return xp.reshape(xp.sum(g, axis=tuple(axes)) if axes else g, shape)

    return pull


def kept(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    """Return the shape after a reduction that keeps its axes."""
    if axis is None:
        return (1,) * len(shape)
    return tuple(1 if i == axis % len(shape) else n for i, n in enumerate(shape))
