"""Communication between the ranks of a group, along the axes of a placement.

Ranks form a grid with the axes :data:`AXES`. A verb takes an axis and concerns the
ranks along it: those whose indices along all other axes are the same. Along an axis of
size 1 every verb is the identity, or does nothing. The functions in :data:`BODIES` are
the specification.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.errors import RunnerError
from inl.spec.op import Spec
from inl.spec.step import Array

if TYPE_CHECKING:
    from inl.backend.base import Backend

AXES = DATA, PIPELINE, TENSOR, EXPERT = "data", "pipeline", "tensor", "expert"
"""Axes of a placement. Ranks are numbered with the last axis changing fastest."""

Parts = Sequence[Any]
"""An array of each rank along an axis, in order."""


def all_reduce(parts: Parts) -> list[Any]:
    """Sum, in the order of the ranks."""
    import numpy as np

    return [reduce(np.add, parts)] * len(parts)


def all_gather(parts: Parts) -> list[Any]:
    """Concatenate along the last axis."""
    import numpy as np

    return [np.concatenate(parts, axis=-1)] * len(parts)


def reduce_scatter(parts: Parts) -> list[Any]:
    """Sum, then give each rank its part of the rows."""
    import numpy as np

    return np.split(all_reduce(parts)[0], len(parts))


def all_to_all(parts: Parts) -> list[Any]:
    """Give rank i the i-th part of each rank's rows, in the order of the ranks."""
    import numpy as np

    split = [np.split(part, len(parts)) for part in parts]
    return [np.concatenate(rows) for rows in zip(*split, strict=True)]


def gather_rows(parts: Parts) -> list[Any]:
    """Concatenate the rows, in the order of the ranks."""
    import numpy as np

    return [np.concatenate(parts)] * len(parts)


BODIES: Mapping[str, Callable[[Parts], list[Any]]] = {
    each.__name__: each for each in (all_reduce, all_gather, reduce_scatter, all_to_all)
}
"""Verb -> its results for the arguments of the ranks along an axis."""


class AbsentVerb(RunnerError):
    """Collectives do not have a verb."""


class Collectives(ABC):
    """Capability: communication between ranks along an axis; all make the same calls.

    ``size``, ``all_reduce`` and ``all_gather`` are required. ``reduce_scatter`` and
    ``all_to_all`` are composed of them and of ``index``; what a backend does not have
    raises :class:`AbsentVerb`. Where :attr:`Ranks.axes` has more than "tensor", all
    verbs are required.
    """

    invariant: bool = False
    """Whether the bits of a sum depend only on the ranks' values."""

    @abstractmethod
    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``."""

    def index(self, axis: str) -> Any:
        """Return the index of this rank along ``axis``, from 0.

        A tensor, int32 [], if one program runs on all ranks.
        """
        return self._absent("index", axis)

    @abstractmethod
    def all_reduce(self, x: Array, axis: str) -> Array:
        """Sum over the ranks; every rank gets the same bits."""

    @abstractmethod
    def all_gather(self, x: Array, axis: str) -> Array:
        """Concatenate the ranks' tensors along the last axis."""

    def reduce_scatter(self, x: Array, axis: str) -> Array:
        """Sum ``x`` [ranks * n, ...] over the ranks and return this rank's n rows."""
        size = self.size(axis)
        rows = self._rows(x, axis, "reduce_scatter")
        parts = self.all_to_all(x, axis).reshape((size, rows, *x.shape[1:]))
        return reduce(add, (parts[rank] for rank in range(size)))

    def all_to_all(self, x: Array, axis: str) -> Array:
        """Send the i-th n rows of ``x`` [ranks * n, ...] to rank i.

        Returns what the ranks sent to this one, in order: [ranks * n, ...].
        """
        size, rest = self.size(axis), tuple(x.shape[1:])
        rows = self._rows(x, axis, "all_to_all")
        gathered = self.all_gather(x.reshape((1, -1)), axis)
        parts = gathered.reshape((size, size, rows, *rest))
        mine: Array = parts[:, self.index(axis)].reshape(x.shape)
        return mine

    def gather_rows(self, parts: Sequence[Array], axis: str) -> tuple[Array, ...]:
        """Concatenate the ranks' rows of each of some tensors: [ranks * n, ...].

        Composed of :meth:`all_gather`, unless overridden by one exchange of all
        tensors.
        """
        if self.size(axis) == 1:
            return tuple(parts)
        return tuple(
            self.all_gather(x.reshape((1, -1)), axis).reshape((-1, *x.shape[1:]))
            for x in parts
        )

    def send(self, x: Array, axis: str, target: int) -> None:  # noqa: ARG002
        """Send ``x`` to the rank with the index ``target``, which calls :meth:`recv`.

        It does not wait for that call: two ranks may send to each other, then receive.
        Tensors arrive in order.
        """
        self._absent("send", axis)

    def recv(self, spec: Spec, axis: str, source: int) -> Array:  # noqa: ARG002
        """Return the next tensor that the rank with the index ``source`` sends here.

        spec: its shape, and the name of its dtype.
        """
        return self._absent("recv", axis)

    def barrier(self, axis: str) -> None:
        """Return when all ranks along ``axis`` have called it, and not before."""
        self._absent("barrier", axis)

    def _rows(self, x: Array, axis: str, verb: str) -> int:
        """Return the rows of a rank; raises RunnerError if the ranks do not divide."""
        size = self.size(axis)
        if not x.shape or x.shape[0] % size:
            raise RunnerError(
                f"{verb} over {axis}: found shape {list(x.shape)} for {size} ranks; "
                f"accepted: a multiple of {size} rows"
            )
        return int(x.shape[0]) // size

    def _absent(self, verb: str, axis: str) -> Any:
        raise AbsentVerb(
            f"{verb} over {axis}: {type(self).__name__} does not offer {verb}"
        )


class Rank(NamedTuple):
    """One of several processes that compute a model: a position in a grid.

    Each field but the first two has a default.
    """

    number: int
    """Number of the rank, from 0: its indices along :data:`AXES`, the last changing
    fastest."""
    ranks: int
    """Number of ranks."""
    address: str = ""
    """HOST:PORT at which rank 0 listens for the others."""
    seconds: float = 600.0
    """Timeout of the rendezvous, and of a rank that waits for another one."""
    axes: tuple[tuple[str, int], ...] = ()
    """Name and size of each axis of the grid whose size is above 1, in the order of
    :data:`AXES`; empty if all ranks are along "tensor"."""
    secret: str = ""
    """What ranks prove themselves with where the library that connects them has no
    such check: 64 hexadecimal digits."""

    @property
    def grid(self) -> dict[str, int]:
        """Size of each axis of :data:`AXES`.

        Raises :class:`~inl.errors.RunnerError` if they do not have ``ranks`` ranks.
        """
        named = dict(self.axes or ((TENSOR, self.ranks),))
        known = len(named) == len(self.axes or "1") and named.keys() <= set(AXES)
        if not known or math.prod(named.values()) != self.ranks:
            raise RunnerError(
                f"rank {self.number} of {self.ranks}: found axes {self.axes}; "
                f"accepted: each of {', '.join(AXES)} at most once, with {self.ranks} "
                "ranks"
            )
        return {axis: named.get(axis, 1) for axis in AXES}

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``."""
        return self.grid[axis]

    def position(self, axis: str) -> int:
        """Return the index of this rank along ``axis``."""
        return self.number // self._stride(axis) % self.size(axis)

    def peers(self, axis: str) -> tuple[int, ...]:
        """Return the numbers of the ranks along ``axis`` through this one, in order."""
        step = self._stride(axis)
        first = self.number - self.position(axis) * step
        return tuple(first + step * index for index in range(self.size(axis)))

    def _stride(self, axis: str) -> int:
        """Difference of the numbers of neighbors along ``axis``."""
        grid = self.grid
        return math.prod(grid[each] for each in AXES[AXES.index(axis) + 1 :])


class Ranks(NamedTuple):
    """Capability: opens the backend as one rank of a group."""

    joining: Callable[[Rank], Backend]
    """Opens the same device as a backend that offers :class:`Collectives`. Blocks until
    all ranks have joined; raises :class:`~inl.errors.RunnerError` on timeout. Engines
    call it once in a process."""
    invariant_ranks: int = 1
    """Largest group whose :attr:`Collectives.invariant` is set."""
    axes: tuple[str, ...] = (TENSOR,)
    """Axes along which its collectives work; feature "collectives_by_axis": all."""
    in_threads: bool = False
    """Whether the ranks of a group may also be threads of one process."""
