"""Collectives of NumPy arrays over messages between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from inl.backend.collectives import BODIES, Collectives, Rank
from inl.spec.op import Spec


class Link(Protocol):
    """Messages between this rank and the others, by their numbers, in order.

    Both raise :class:`~inl.errors.RunnerError` if the other rank has ended, or does not
    answer in time.
    """

    def send(self, x: Any, target: int) -> None:
        """Send an array to a rank, without waiting until that receives it."""

    def recv(self, source: int) -> Any:
        """Return the next array of a rank."""


class PeerCollectives(Collectives):
    """Every verb is its body on the exchanged arrays, hence invariant."""

    invariant = True

    def __init__(self, rank: Rank, link: Link) -> None:
        self._link, self._number = link, rank.number
        self._peers = {axis: rank.peers(axis) for axis in rank.grid}

    def size(self, axis: str) -> int:
        return len(self._peers[axis])

    def index(self, axis: str) -> int:
        return self._peers[axis].index(self._number)

    def all_reduce(self, x: Any, axis: str) -> Any:
        return self._of_all("all_reduce", x, axis)

    def all_gather(self, x: Any, axis: str) -> Any:
        return self._of_all("all_gather", x, axis)

    def gather_rows(self, parts: Sequence[Any], axis: str) -> tuple[Any, ...]:
        size = self.size(axis)
        return tuple(np.concatenate(self._exchange([x] * size, axis)) for x in parts)

    def all_to_all(self, x: Any, axis: str) -> Any:
        self._rows(x, axis, "all_to_all")
        return np.concatenate(self._exchange(np.split(x, self.size(axis)), axis))

    def send(self, x: Any, axis: str, target: int) -> None:
        self._link.send(x, self._peers[axis][target])

    def recv(self, spec: Spec, axis: str, source: int) -> Any:  # noqa: ARG002
        return self._link.recv(self._peers[axis][source])

    def barrier(self, axis: str) -> None:
        self._of_all("all_gather", np.zeros(1, np.int32), axis)

    def _of_all(self, verb: str, x: Any, axis: str) -> Any:
        size = self.size(axis)
        if size == 1:
            return x
        return BODIES[verb](self._exchange([x] * size, axis))[self.index(axis)]

    def _exchange(self, parts: list[Any], axis: str) -> list[Any]:
        """Send each rank its part and return theirs, in order; the own one is kept."""
        mine, peers = self._number, self._peers[axis]
        for peer, part in zip(peers, parts, strict=True):
            if peer != mine:
                self._link.send(part, peer)
        return [
            part if peer == mine else self._link.recv(peer)
            for peer, part in zip(peers, parts, strict=True)
        ]
