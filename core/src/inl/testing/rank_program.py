"""What each rank of a group computes to check its collectives, as ``inl check`` does.

``python -m inl.testing.rank_process`` runs it in a process of its own.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.backend.collectives import (
    AXES,
    BODIES,
    AbsentVerb,
    Collectives,
    Rank,
    gather_rows,
)
from inl.dtypes import cast, widen, wrap
from inl.spec.op import Spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.backend.base import Backend

ROWS: Final = (1, 2, 120)
"""Rows of a rank's part, of each call: the last does not fit in a socket's buffers."""
COLUMNS: Final = (3, 1, 700)
LARGEST: Final = 8
"""Numbers are integers of at most this size: their sums are exact in every dtype."""
LATE_SECONDS: Final = 0.2
"""How late the last rank comes to a barrier."""


class RankCheck(NamedTuple):
    """One rank, and what its inputs depend on."""

    backend: Backend
    collectives: Collectives
    rank: Rank
    seed: int
    folder: Path
    """Folder that all ranks see."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of the tensors."""
        return *self.backend.traits.dtypes, "int32"

    def inputs(self, *name: object, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the arrays of all ranks: integers [ranks, *shape]."""
        seed = [self.seed, *(zlib.crc32(str(each).encode()) for each in name)]
        rng = np.random.default_rng(seed)
        return rng.integers(-LARGEST, LARGEST, (self.rank.ranks, *shape), endpoint=True)

    def tensor(self, values: NDArray[Any], dtype: str) -> Any:
        """Copy values to the rank's device."""
        if dtype == "int32":
            return self.backend.tensor(wrap(values.astype(np.int32)))
        return self.backend.tensor(cast(values.astype(np.float64), dtype))

    def found(self, x: Any) -> NDArray[Any]:
        """Copy a tensor to the host."""
        return np.asarray(widen(self.backend.numpy(x)))

    def where(self, axis: str, *more: object) -> str:
        """Say which rank and call it is."""
        grid = ",".join(f"{name}={size}" for name, size in self.rank.grid.items())
        parts = [f"rank {self.rank.number} of {grid}, along {axis}", *map(str, more)]
        return ", ".join(parts)


def faults(check: RankCheck, verb: str) -> Iterator[str]:
    """Yield what is wrong with a verb; every rank makes the same calls.

    Nothing for a verb that the collectives do not have, if they need not.
    """
    try:
        for axis in AXES:
            yield from VERBS[verb](check, axis)
    except AbsentVerb as error:
        if check.rank.axes != (("tensor", check.rank.ranks),):
            yield str(error)


def _size(check: RankCheck, axis: str) -> Iterator[str]:
    found, want = check.collectives.size(axis), check.rank.size(axis)
    if found != want:
        yield f"{check.where(axis)}: found {found!r}, expected {want}"


def _index(check: RankCheck, axis: str) -> Iterator[str]:
    found, want = check.collectives.index(axis), check.rank.position(axis)
    if found != want:
        yield f"{check.where(axis)}: found {found!r}, expected {want}"


def _exchanging(verb: str) -> Callable[[RankCheck, str], Iterator[str]]:
    """Return the check of a verb that has a body."""

    def run(check: RankCheck, axis: str) -> Iterator[str]:
        rank, size = check.rank, check.rank.size(axis)
        before: NDArray[Any] | None = None
        for call, (rows, columns) in enumerate(zip(ROWS, COLUMNS, strict=True)):
            for dtype in check.dtypes:
                shape = size * rows, columns
                parts = check.inputs(verb, axis, call, dtype, shape=shape)
                x = check.tensor(parts[rank.number], dtype)
                found = check.found(getattr(check.collectives, verb)(x, axis))
                want = body_result(verb, parts, rank, axis)
                if not np.array_equal(found, want):
                    known = _known_errors(verb, parts, rank, axis)
                    known["the result of the call before"] = before
                    where = check.where(axis, f"call {call}", dtype)
                    yield f"{where}: {_difference(found, want, known)}"
                before = want

    return run


def body_result(verb: str, parts: NDArray[Any], rank: Rank, axis: str) -> NDArray[Any]:
    """Return what the body gives a rank. parts: of all ranks, [ranks, ...]."""
    arguments = [parts[each] for each in rank.peers(axis)]
    return np.asarray(BODIES[verb](arguments)[rank.position(axis)])


def _known_errors(
    verb: str, parts: NDArray[Any], rank: Rank, axis: str
) -> dict[str, NDArray[Any] | None]:
    """Return wrong results by what they are."""
    known: dict[str, NDArray[Any] | None] = {
        "its own argument: nothing was exchanged": parts[rank.number]
    }
    peers = rank.peers(axis)
    for index, peer in enumerate(peers):
        if peer != rank.number:
            theirs = body_result(verb, parts, rank._replace(number=peer), axis)
            known[f"the result of the rank with index {index}"] = theirs
    turned = [parts[each] for each in reversed(peers)]
    result = BODIES[verb](turned)[rank.position(axis)]
    known["the ranks' parts in another order"] = np.asarray(result)
    for other in AXES:
        if other != axis and parts.shape[1] % rank.size(other) == 0:
            known[f"the result along {other}"] = body_result(verb, parts, rank, other)
    whole = rank._replace(axes=())
    if parts.shape[1] % rank.ranks == 0:
        known["the result over all ranks"] = body_result(verb, parts, whole, "tensor")
    return known


def _difference(
    found: NDArray[Any], want: NDArray[Any], known: Mapping[str, NDArray[Any] | None]
) -> str:
    for name, values in known.items():
        if values is not None and np.array_equal(found, values):
            return f"found {name}"
    if found.shape != want.shape:
        return f"found shape {list(found.shape)}, expected {list(want.shape)}"
    at = tuple(int(each) for each in np.argwhere(found != want)[0])
    return f"found {found[at]} at {list(at)}, expected {want[at]}"


def _gather_rows(check: RankCheck, axis: str) -> Iterator[str]:
    """Each rank gives two tensors of different dtypes in one call."""
    rank = check.rank
    for call, (rows, columns) in enumerate(zip(ROWS, COLUMNS, strict=True)):
        for dtype in check.dtypes:
            given = [
                check.inputs("gather_rows", axis, call, dtype, shape=(rows, width))
                for width in (columns, 3)
            ]
            tensors = [
                check.tensor(parts[rank.number], each)
                for parts, each in zip(given, (dtype, "int32"), strict=True)
            ]
            found = check.collectives.gather_rows(tensors, axis)
            for number, (x, parts) in enumerate(zip(found, given, strict=True)):
                theirs = [parts[each] for each in rank.peers(axis)]
                want = np.asarray(gather_rows(theirs)[0])
                known: dict[str, NDArray[Any] | None] = {
                    "its own argument: nothing was exchanged": parts[rank.number],
                    "the ranks' parts in another order": np.concatenate(theirs[::-1]),
                }
                if not np.array_equal(mine := check.found(x), want):
                    where = check.where(axis, f"call {call}", dtype, f"tensor {number}")
                    yield f"{where}: {_difference(mine, want, known)}"


def _send_recv(check: RankCheck, axis: str) -> Iterator[str]:
    """Each rank sends two messages to the next one, and then receives two."""
    rank, peers = check.rank, check.rank.peers(axis)
    index, size = rank.position(axis), len(peers)
    if size == 1:
        return
    source = (index - 1) % size
    for call, (rows, columns) in enumerate(zip(ROWS, COLUMNS, strict=True)):
        for dtype in check.dtypes:
            shape = 2, rows, columns
            parts = check.inputs("send", axis, call, dtype, shape=shape)
            for each in parts[rank.number]:
                x = check.tensor(each, dtype)
                check.collectives.send(x, axis, (index + 1) % size)
            spec = Spec((rows, columns), dtype)
            received = [check.collectives.recv(spec, axis, source) for _ in range(2)]
            for number, x in enumerate(received):
                want = parts[peers[source], number]
                found = check.found(x)
                if not np.array_equal(found, want):
                    known: dict[str, NDArray[Any] | None] = {
                        "what this rank sent": parts[rank.number, number],
                        "the other message: it is stale, or out of order": parts[
                            peers[source], 1 - number
                        ],
                    }
                    for other in range(rank.ranks):
                        known[f"what rank {other} sent"] = parts[other, number]
                    where = check.where(axis, f"call {call}", f"message {number}")
                    yield f"{where}, {dtype}: {_difference(found, want, known)}"


def _barrier(check: RankCheck, axis: str) -> Iterator[str]:
    peers = check.rank.peers(axis)
    for call in range(2):
        name = f"{axis}-{call}-"
        if check.rank.number == peers[-1] and len(peers) > 1:
            time.sleep(LATE_SECONDS)
        (check.folder / f"{name}{check.rank.number}").touch()
        check.collectives.barrier(axis)
        absent = [n for n in peers if not (check.folder / f"{name}{n}").exists()]
        if absent:
            where = check.where(axis, f"call {call}")
            yield f"{where}: returned before rank {absent[0]} had called it"


VERBS: Mapping[str, Callable[[RankCheck, str], Iterator[str]]] = {
    "size": _size,
    "index": _index,
    **{verb: _exchanging(verb) for verb in BODIES},
    "gather_rows": _gather_rows,
    "send_recv": _send_recv,
    "barrier": _barrier,
}
"""Verb, or verbs, of :class:`Collectives` -> its check on one rank along one axis."""
