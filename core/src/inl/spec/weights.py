"""Weights that a model declares: parameters, the groups that one op takes, layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

Weights = TypeVar("Weights", bound=tuple[Any, ...])
"""A named tuple of the tensors of one group."""


class RowSlices(NamedTuple):
    """Row ranges of a stored tensor, concatenated to a logical tensor."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) along axis 0, in the order of concatenation."""
    rows: int
    """Rows of the stored tensor."""

    def part(self, start: int, stop: int) -> RowSlices:
        """Return the rows ``[start, stop)`` of the logical tensor."""
        spans: list[tuple[int, int]] = []
        at = 0
        for first, last in self.spans:
            low, high = max(start - at, 0), min(stop - at, last - first)
            if low < high:
                spans.append((first + low, first + high))
            at += last - first
        return RowSlices(tuple(spans), self.rows)


class FusedSlice(NamedTuple):
    """One of several equally sized tensors that a checkpoint stores as one."""

    axis: int
    """Axis of the stored tensor along which they are concatenated; not 0."""
    position: int
    """Index of this tensor, from 0."""
    total: int
    """Number of concatenated tensors."""


class Param(NamedTuple):
    """One logical tensor of a checkpoint."""

    source: str
    """Tensor name in the Hugging Face layout."""
    shape: tuple[int, ...]
    axis: int | None = None
    """Axis sharded over tensor-parallel ranks; ``None`` replicates the tensor."""
    optional: bool = False
    """Whether the tensor may be missing; the group's field is then ``None``."""
    row_slices: RowSlices | None = None
    """Rows of the stored tensor that form this one; ``None`` is all rows in order."""
    offset: float = 0.0
    """Added to every element before rounding to the compute dtype."""
    stack: int = 0
    """Number of stored tensors to stack along axis 0. ``{}`` in ``source`` is replaced
    by their indices, from 0. 0 loads a single tensor without stacking."""
    fused_slice: FusedSlice | None = None
    """Slice of the stored tensor that forms this one; ``None`` is all of it."""
    aliases: tuple[Param, ...] = ()
    """The same tensor in other checkpoint layouts. The first form of which the
    checkpoint has any tensor is used."""
    partial: bool = False
    """Whether the tensor is added to a partial sum over ranks: rank 0 has it, the
    others have zeros."""
    finite: bool = False
    """Whether to reject NaN and infinity when loading; meant for small tensors."""
    wide: bool = False
    """Whether to load float32 whatever the compute dtype; meant for small tensors."""
    expert_partial: bool = False
    """Whether the tensor is added to a partial sum over the ranks that share the
    experts: the first of them has it, the others have zeros."""
    order: tuple[int, ...] = ()
    """Index of each entry of axis 0 among those that are stored, some of which may
    occur several times; empty for all of them in order."""


@dataclass(frozen=True, slots=True, init=False)
class Group:
    """Parameters that one op takes together, so that a kernel may pack them.

    A leaf of a model's weight tree; loading replaces it by a tuple of tensors.
    """

    op: str
    params: Mapping[str, Param]

    def __init__(self, op: str, **params: Param) -> None:
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "params", params)


def in_layout(layout: str) -> Callable[[type[Weights]], type[Weights]]:
    """Return a function that makes the type of a group's tuple in a packed layout.

    Applied to the tuple of an op whose matrices a kernel packs, or as a decorator to a
    tuple with fields of the kernel's own. Returns a subclass with the attribute
    ``layout``, the same one for equal arguments.
    """
    return lambda weights: _in_layout(weights, layout)


@cache
def _in_layout(weights: type[Any], layout: str) -> Any:
    namespace = {
        "__slots__": (), "__doc__": weights.__doc__, "__module__": weights.__module__,
        "layout": layout,
    }  # fmt: skip
    return type(weights.__name__, (weights,), namespace)
