"""Ranks of contract 1: they meet at a file, and are all along the axis "tensor"."""

from __future__ import annotations

import atexit
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, final

from inl.backend.base import Backend
from inl.backend.collectives import TENSOR, Collectives, Rank
from inl.errors import BackendUnavailable
from inl.spec.step import Array


class RankOfV1(NamedTuple):
    """The rank that contract 1 passes to :attr:`~inl.backend.base.Ranks.joining`."""

    number: int
    ranks: int
    meeting: str
    """Path of a file that does not exist yet, used for rendezvous."""
    seconds: float


@final
class TensorCollectives(Collectives):
    """Collectives of contract 1, which do not look at the axis, along "tensor"."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped
        self.invariant = wrapped.invariant

    def size(self, axis: str) -> int:
        return int(self._wrapped.size(axis)) if axis == TENSOR else 1

    def all_reduce(self, x: Array, axis: str) -> Array:
        return self._wrapped.all_reduce(x, axis) if axis == TENSOR else x

    def all_gather(self, x: Array, axis: str) -> Array:
        return self._wrapped.all_gather(x, axis) if axis == TENSOR else x


def joining_by_file(joining: Callable[[Any], Backend]) -> Callable[[Rank], Backend]:
    """Return a ``joining`` of contract 2 that calls one of contract 1.

    All ranks of a group derive the same file from its secret. It raises
    :class:`~inl.errors.BackendUnavailable` for ranks along another axis.
    """

    def join(rank: Rank) -> Backend:
        if rank.size(TENSOR) != rank.ranks:
            raise BackendUnavailable(
                f"rank {rank.number}: found axes {rank.axes}; backends of contract 1 "
                f"have ranks along {TENSOR}"
            )
        name = hashlib.sha256(f"{rank.address} {rank.secret}".encode()).hexdigest()
        meeting = Path(tempfile.gettempdir(), f"inl-ranks-{name}")
        if rank.number == 0:
            atexit.register(meeting.unlink, missing_ok=True)
        return joining(RankOfV1(rank.number, rank.ranks, str(meeting), rank.seconds))

    return join
