"""Weights that a model declares: parameters, and groups that one op takes together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class RowSlices(NamedTuple):
    """Rows of a stored tensor that make a logical one."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) along axis 0; what they hold is put together in this order."""
    rows: int
    """Rows of the stored tensor."""


class FusedSlice(NamedTuple):
    """One of several tensors of one size that a checkpoint stores as one."""

    axis: int
    """Axis of the stored tensor along which they follow one another; not 0."""
    position: int
    """Which of them, from 0."""
    total: int
    """How many there are."""


class Param(NamedTuple):
    """One logical tensor of a checkpoint."""

    source: str
    """Its name in the Hugging Face layout."""
    shape: tuple[int, ...]
    axis: int | None = None
    """Axis cut over tensor-parallel ranks; ``None`` is a copy on each."""
    optional: bool = False
    """May be absent; then the group's field is ``None``."""
    row_slices: RowSlices | None = None
    """The part of the stored tensor that this is, where that holds more or another
    order; ``None`` is all of it."""
    offset: float = 0.0
    """Added to every number, before it is rounded to the compute dtype."""
    stack: int = 0
    """Stored tensors that make up axis 0, one each: ``{}`` in ``source`` stands for
    their numbers, from 0. 0 is one tensor as it is."""
    fused_slice: FusedSlice | None = None
    """Which part of the stored tensor this is; ``None`` is all of it."""
    aliases: tuple[Param, ...] = ()
    """The same tensor as other files have it: the first of which the checkpoint has
    anything is taken."""
    finite: bool = False
    """Whether NaN and infinity are refused when it is loaded: for small tensors."""


@dataclass(frozen=True, slots=True, init=False)
class Group:
    """Parameters that one op takes together, so that a kernel may pack them."""

    op: str
    params: Mapping[str, Param]

    def __init__(self, op: str, **params: Param) -> None:
        object.__setattr__(self, "op", op)
        object.__setattr__(self, "params", params)
