"""Faults of collectives: ``inl check`` finds each and names the verb and what it does.

Ranks are threads on the reference's transport; one verb is wrong on all or some ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from inl.backend.base import Traits
from inl.backend.collectives import AXES, PIPELINE, TENSOR, Collectives, Ranks
from inl.backend.peer_collectives import PeerCollectives
from inl.backend.rank_sockets import SocketLink
from inl.backend.reference import body_kernel
from inl.backend.simple import simple_backend
from inl.device import Device
from inl.dtypes import widen, wrap
from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.testing.check import perform
from inl.testing.conformance import checks_of
from inl.testing.findings import findings
from inl.testing.target import Target


class Planted(PeerCollectives):
    """Right; the classes below change one verb."""

    def __init__(self, rank):
        super().__init__(rank, SocketLink(rank))
        self.rank = rank


class AllRanks(Planted):
    def size(self, axis):
        return self.rank.ranks


class Mirrored(Planted):
    def index(self, axis):
        return self.size(axis) - 1 - super().index(axis)


class OtherAxis(Planted):
    def all_reduce(self, x, axis):
        other = PIPELINE if axis == TENSOR else TENSOR
        return super().all_reduce(x, other if axis in (PIPELINE, TENSOR) else axis)


class Unsummed(Planted):
    def all_reduce(self, x, axis):
        total = super().all_reduce(x, axis)
        return x if self.rank.number == 3 else total


class WrongOrder(Planted):
    def all_gather(self, x, axis):
        parts = np.split(super().all_gather(x, axis), self.size(axis), axis=-1)
        return np.concatenate(parts[::-1], axis=-1)


class RowsInstead(Planted):
    def all_gather(self, x, axis):
        parts = np.split(super().all_gather(x, axis), self.size(axis), axis=-1)
        return np.concatenate(parts)


class WrongPart(Planted):
    def reduce_scatter(self, x, axis):
        parts = np.split(self.all_reduce(x, axis), self.size(axis))
        return parts[-1 - self.index(axis)]


class Transposed(Planted):
    def all_to_all(self, x, axis):
        size = self.size(axis)
        gathered = np.stack(np.split(super().all_gather(x, axis), size, axis=-1))
        return gathered[self.index(axis)]

    def reduce_scatter(self, x, axis):
        return np.split(self.all_reduce(x, axis), self.size(axis))[self.index(axis)]


class TurnedRows(Planted):
    def gather_rows(self, parts, axis):
        found = super().gather_rows(parts, axis)
        size = self.size(axis)
        return tuple(np.concatenate(np.split(x, size)[::-1]) for x in found)


class Stale(Planted):
    """Receives into one buffer that the next message overwrites too late."""

    before: Any = None

    def recv(self, spec, axis, source):
        found, before = super().recv(spec, axis, source), self.before
        self.before = found
        return found if before is None or before.shape != found.shape else before


class Echo(Planted):
    def send(self, x, axis, target):
        super().send(x, axis, target)
        self.sent = [*getattr(self, "sent", []), x]

    def recv(self, spec, axis, source):
        super().recv(spec, axis, source)
        return self.sent.pop(0)


class Waiting(Planted):
    """Sends when the peer receives, as an unbuffered connection does, or gives up."""

    def send(self, x, axis, target):
        super().send(x, axis, target)
        link, seconds = self._link, 3.0
        link._rank = link._rank._replace(seconds=seconds)
        link._sockets[self._peers[axis][target]].settimeout(seconds)
        super().recv(None, axis, target)

    def recv(self, spec, axis, source):
        found = super().recv(spec, axis, source)
        super().send(np.zeros(1), axis, source)
        return found


class Open(Planted):
    def barrier(self, axis):
        """Wait for nobody."""


class Two(Collectives):
    """The verbs of contract 1 only."""

    def __init__(self, rank):
        self._real = Planted(rank)

    def size(self, axis):
        return self._real.size(axis)

    def all_reduce(self, x, axis):
        return self._real.all_reduce(x, axis)

    def all_gather(self, x, axis):
        return self._real.all_gather(x, axis)


class Three(Two):
    """With an index, whence the composed verbs."""

    def index(self, axis):
        return self._real.index(axis)


FAULTS = {
    "size": (AllRanks, "found 4, expected 1"),
    "index": (Mirrored, "found 1, expected 0"),
    "all_reduce": (OtherAxis, "found the result along"),
    "all_reduce of one rank": (Unsummed, "found its own argument"),
    "all_gather": (WrongOrder, "found the ranks' parts in another order"),
    "all_gather of rows": (RowsInstead, "found shape [4, 3], expected [2, 6]"),
    "reduce_scatter": (WrongPart, "found the result of the rank with index"),
    "all_to_all": (Transposed, "found its own argument"),
    "gather_rows": (TurnedRows, "found the ranks' parts in another order"),
    "send_recv stale": (Stale, "found the other message: it is stale"),
    "send_recv": (Echo, "found what this rank sent"),
    "barrier": (Open, "returned before rank"),
}
"""Verb, and what is wrong -> the collectives, and a part of the message."""


def found_by(kind, axes=AXES):
    def tensor(host):
        values = widen(host)
        wide = values.dtype.kind == "f"
        return np.array(values, np.float32 if wide else values.dtype)

    def kernels():
        for op in catalog().values():
            if not op.composite:
                yield Kernel(op.name, "planted", body_kernel(op, "float32"))

    make = partial(
        simple_backend, tensor=tensor, numpy=wrap, kernels=kernels, traits=Traits()
    )

    def join(rank):
        return make(capabilities=[kind(rank)])(Device("planted:0"))

    target = Target(Device("planted:0"))
    ranks = Ranks(join, axes=axes, in_threads=True)
    target.__dict__["backend"] = make(capabilities=[ranks])(target.device)
    results = [perform(check, {}) for check in checks_of(target, ["ranks"])]
    assert len(results) == 9
    return findings(results)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_verb_is_named(fault):
    kind, part = FAULTS[fault]
    verb = fault.partition(" ")[0]
    found = found_by(kind)
    names = {each.first.name for each in found}
    assert f"ranks/{verb}" in names
    text = next(each.first.message for each in found if each.first.name.endswith(verb))
    assert text.startswith(f"{verb}: rank ")
    assert part in text
    # A wrong size or index is wrong in every verb that uses it.
    if verb not in ("size", "index"):
        assert names == {f"ranks/{verb}"}


def test_a_send_that_waits_for_its_peer_is_named():
    """Ranks join, and other verbs wait, without the limit of a send."""
    (found,) = found_by(Waiting)
    assert found.first.name == "ranks/send_recv"
    assert "no message in 3 s" in found.first.message


@pytest.mark.parametrize("kind", [Planted, Three])
def test_right_collectives_pass(kind):
    if kind is Planted:
        assert found_by(kind) == []
    assert found_by(kind, (TENSOR,)) == []


def test_two_verbs_are_enough_for_the_tensor_axis():
    assert found_by(Two, (TENSOR,)) == []
    absent = {each.first.name for each in found_by(Two)}
    assert absent == {
        "ranks/index", "ranks/reduce_scatter", "ranks/all_to_all", "ranks/send_recv",
        "ranks/barrier",
    }  # fmt: skip
