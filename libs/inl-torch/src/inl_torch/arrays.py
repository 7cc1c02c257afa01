"""Functions on torch tensors with NumPy's names, see :mod:`inl.functional.arrays`."""

from __future__ import annotations

from typing import Any

import torch
from torch import abs as abs  # noqa: A004
from torch import broadcast_to as broadcast_to
from torch import concatenate as concatenate
from torch import einsum as einsum
from torch import exp as exp
from torch import log as log
from torch import matmul as matmul
from torch import ones_like as ones_like
from torch import reshape as reshape
from torch import sqrt as sqrt
from torch import square as square
from torch import swapaxes as swapaxes
from torch import tanh as tanh
from torch import where as where
from torch import zeros_like as zeros_like

Axis = int | tuple[int, ...] | None


def maximum(x: torch.Tensor, y: Any) -> torch.Tensor:
    """Return the larger of each pair of elements; y: a tensor or a number."""
    return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp_min(y)


def sum(x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:  # noqa: A001
    """Sum over axes, all by default."""
    return torch.sum(x, axis, keepdims)


def mean(x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:
    """Average over axes, all by default."""
    return torch.mean(x, axis, keepdims)


def max(x: torch.Tensor, axis: Axis = None, keepdims: bool = False) -> torch.Tensor:  # noqa: A001
    """Return the largest element over axes, all by default."""
    return torch.amax(x, () if axis is None else axis, keepdims)


def stack(arrays: Any, axis: int = 0) -> torch.Tensor:
    """Join tensors of equal shape along a new axis."""
    return torch.stack(tuple(arrays), axis)


def take(x: torch.Tensor, index: torch.Tensor, axis: int) -> torch.Tensor:
    """Gather slices ``index`` [n] along ``axis``."""
    return torch.index_select(x, axis, index)
