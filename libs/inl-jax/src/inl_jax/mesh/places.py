"""Tensors of which only the first device along the tensor axis has the values."""

from __future__ import annotations

from inl.placement.mesh import TENSOR

Axes = tuple[str | tuple[str, ...] | None, ...]


def partial_axes(axes: tuple[str | None, ...]) -> Axes:
    """Return the division of an array of :func:`~inl.placement.mesh.first_of`.

    axes: that of the array that it was made of.
    """
    first = TENSOR if axes[0] is None else (TENSOR, axes[0])
    return (first, *axes[1:])
