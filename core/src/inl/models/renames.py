"""Checkpoints whose tensors have other names than Llama's, or are fused otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from inl.checkpoints.adapted import AdaptedCheckpoint, Piece
from inl.checkpoints.checkpoint import Checkpoint
from inl.dtypes import HostArray

Split = Callable[[str, str, tuple[int, ...]], Mapping[str, Piece] | None]
"""(stored name, new name, shape) -> pieces by name, ``None`` for one piece as it is."""


def renamed(
    checkpoint: Checkpoint, patterns: Mapping[str, str], split: Split | None = None
) -> AdaptedCheckpoint:
    """Return a checkpoint with other names of tensors.

    patterns: parts of names as regular expressions, and what replaces them, in order;
    a tensor whose name becomes empty is left out. split: makes several tensors of one.
    """
    pieces: dict[str, Piece] = {}
    for name in checkpoint.names():
        new = name
        for pattern, other in patterns.items():
            new = re.sub(pattern, other, new)
        if new:
            shape = checkpoint.spec(name)[1]
            parts = split(name, new, shape) if split else None
            pieces |= parts or {new: Piece((name,), shape)}
    return AdaptedCheckpoint(checkpoint, pieces)


def third(
    name: str, shape: tuple[int, ...], index: int, *, heads: int = 1,
    transposed: bool = False,
) -> Piece:  # fmt: skip
    """Return the rows ``index`` of each of ``heads`` triples of row ranges.

    transposed: whether a matrix is stored as [in, out].
    """
    shape = shape[::-1] if transposed else shape
    make = partial(_third, index, heads, transposed)
    return Piece((name,), (shape[0] // 3, *shape[1:]), make)


def range_of_rows(name: str, shape: tuple[int, ...], start: int, stop: int) -> Piece:
    """Return the rows from ``start`` up to ``stop`` of a stored tensor."""

    def make(stored: Sequence[HostArray]) -> HostArray:
        data = np.ascontiguousarray(stored[0].data[start:stop])
        return HostArray(data, stored[0].dtype, (stop - start, *stored[0].shape[1:]))

    return Piece((name,), (stop - start, *shape[1:]), make)


def turned(name: str, shape: tuple[int, ...]) -> Piece:
    """Return the transpose of a stored matrix."""
    return Piece((name,), shape[::-1], lambda stored: _turned(stored[0]))


def _third(
    index: int, heads: int, transposed: bool, stored: Sequence[HostArray]
) -> HostArray:
    array = _turned(stored[0]) if transposed else stored[0]
    total, *rest = array.data.shape
    parts = array.data.reshape(heads, 3, total // (3 * heads), *rest)[:, index]
    data = np.ascontiguousarray(parts.reshape(total // 3, *rest))
    return HostArray(data, array.dtype, (total // 3, *array.shape[1:]))


def _turned(array: HostArray) -> HostArray:
    data = np.ascontiguousarray(array.data.T)
    return HostArray(data, array.dtype, array.shape[::-1])
