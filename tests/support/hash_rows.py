"""Ranks of hash runners that divide the rows of a step."""

from __future__ import annotations

from random import Random

from inl.runners.group_runner import RankRunner
from inl.runners.row_shares import one_rank_limits
from inl.testing.hash_runner import HashRunner


class HashRank(HashRunner):
    """One rank, to which no row of a step may belong."""

    least_rows = 0


class HashRows:
    """Runner of such a group, as :class:`HashRunner`; ``tensor`` ranks of each part."""

    def __init__(self, limits, *, lag=None, tensor=1):
        own, ranks = one_rank_limits(limits), limits.data_ranks

        def make(rank):
            return HashRank(own, lag=None if lag is None else Random(repr(limits)))

        self.group = RankRunner(
            make, ranks * tensor, abort=lambda: None, data_ranks=ranks
        )

    def __getattr__(self, name):
        return getattr(self.group, name)

    @property
    def slots_in_use(self):
        self.group._last_round.wait()  # releases are sent without waiting for them
        return sorted({slot for one in self.group.runners for slot in one.slots_in_use})
