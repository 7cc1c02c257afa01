"""Ranks of backends of contract 1: a file where they meet, and no axes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path

import numpy as np
import pytest

from inl.backend.base import Collectives, Ranks
from inl.backend.collectives import Rank
from inl.backend.reference import Rendezvous, ThreadCollectives
from inl.errors import BackendUnavailable
from inl.plugin.contract_v1 import adapted

MEETING = Rendezvous(2)


class OldCollectives(Collectives):
    """As contract 1 described them: the axis is ignored."""

    def __init__(self, rank):
        self.peers = ThreadCollectives(rank.ranks, rank.number, MEETING)

    def size(self, axis):
        return self.peers.size("tensor")

    def all_reduce(self, x, axis):
        return self.peers.all_reduce(x, "tensor")

    def all_gather(self, x, axis):
        return self.peers.all_gather(x, "tensor")


class OldBackend:
    """The part of a backend of contract 1 that has ranks."""

    def __init__(self, collectives=None, seen=None):
        self.collectives = collectives
        self.seen = [] if seen is None else seen

    def compile(self, function, bucket, *, consumes, info):
        return function

    def offers(self, kind):
        offer = {Collectives: self.collectives, Ranks: Ranks(self.join)}
        return offer.get(kind)

    def join(self, rank):
        assert rank._fields == ("number", "ranks", "meeting", "seconds")
        assert not Path(rank.meeting).exists()
        self.seen.append(rank)
        return OldBackend(OldCollectives(rank))


def rank_of(number, ranks, **fields):
    return Rank(
        number=number, ranks=ranks, address="127.0.0.1:9", seconds=5.0, **fields
    )


def test_ranks_of_contract_1_meet_at_a_file_and_along_tensor():
    backend = adapted(OldBackend())

    def total(number):
        joined = backend.offers(Ranks).joining(rank_of(number, 2, secret="ab"))
        found = joined.offers(Collectives)
        x = np.full((1, 2), number + 1)
        assert [found.size(axis) for axis in ("tensor", "pipeline")] == [2, 1]
        assert found.all_reduce(x, "pipeline") is found.all_gather(x, "data") is x
        sums, all_parts = (
            getattr(found, verb)(x, "tensor").tolist()
            for verb in ("all_reduce", "all_gather")
        )
        return sums, all_parts

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(total, range(2)))
    assert found == [([[3, 3]], [[1, 1, 2, 2]])] * 2
    first, second = sorted(backend.seen)
    assert (first.number, second.number, first.seconds) == (0, 1, 5.0)
    assert first.meeting == second.meeting


def test_another_group_meets_at_another_file():
    backend = adapted(OldBackend())
    for secret in "ab", "cd":
        backend.offers(Ranks).joining(rank_of(1, 2, secret=secret))
    assert len({rank.meeting for rank in backend.seen}) == 2


def test_contract_1_has_no_ranks_along_other_axes():
    backend = adapted(OldBackend())
    with pytest.raises(BackendUnavailable, match="contract 1 have ranks along tensor"):
        backend.offers(Ranks).joining(rank_of(0, 2, axes=(("pipeline", 2),)))
    assert not backend.seen


class CopiedBackend(OldBackend):
    """One that joins as a copy of itself."""

    def join(self, rank):
        twin = copy(self)
        twin.collectives = OldCollectives(rank)
        return twin


def test_a_copy_has_its_own_capabilities():
    backend = adapted(CopiedBackend())
    joined = backend.offers(Ranks).joining(rank_of(1, 2))
    assert joined.offers(Collectives).size("tensor") == 2
    assert backend.offers(Collectives) is None
