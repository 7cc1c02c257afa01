"""Tensors of which only the first device along the tensor axis has the values."""

from __future__ import annotations

import numpy as np

from inl.dtypes import HostArray
from inl.placement.mesh import TENSOR

Axes = tuple[str | None, ...]


def partial_axes(axes: Axes) -> Axes:
    """Return the division of an array of :func:`first_of`."""
    return (TENSOR, *axes[1:])


def first_of(data: HostArray, ranks: int) -> HostArray:
    """Return an array [ranks * n, ...]: the given one of [n, ...], then zeros."""
    first = data.data
    zeros = np.zeros(((ranks - 1) * first.shape[0], *first.shape[1:]), first.dtype)
    shape = data.shape[0] * ranks, *data.shape[1:]
    return HostArray(np.concatenate([first, zeros]), data.dtype, shape)
