"""When blocks that the device evicts are read back: never before their step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inl.engine.block_copies import BlockCopies
from inl.errors import OutOfMemory
from inl.kv.tier import BlockMove
from inl.kv_tiers.tiers import BlockTiers, Costs
from inl.protocol.runner import MAX_READS
from inl.spec.limits import Limits
from inl.spec.message import MAX_TRANSFER
from inl.testing.hash_runner import HashRunner

LIMITS = Limits(5, (200,), 4, 8, 100, depth=2)


class Counted(HashRunner):
    """Counts the READ frames whose contents are on their way."""

    waiting = most = 0

    def submit(self, message):
        super().submit(message)
        self.waiting += 1
        self.most = max(self.most, self.waiting)

    def read(self):
        self.waiting -= 1
        return super().read()


def plan(step, blocks):
    stores = [BlockMove(0, bytes([block]) * 32, block) for block in blocks]
    return SimpleNamespace(step=step, stores=stores, loads=[], tokens=1)


@pytest.fixture
def made():
    tiers = BlockTiers(Costs(), host_bytes=1 << 20)
    return BlockCopies(tiers, None), tiers.host, Counted(LIMITS)


def test_what_was_read_before_a_later_step_is_not_waited_for(made):
    copies, host, runner = made
    first, second = plan(1, range(1, 4)), plan(2, range(4, 9))
    copies.submit(first, runner)
    copies.submit(second, runner)
    copies.collect(first, runner)
    assert (len(host), runner.waiting) == (3, 1)
    copies.collect(second, runner)
    assert (len(host), runner.waiting) == (8, 0)


def test_a_step_that_evicts_much_waits_for_the_oldest_copies(made):
    copies, host, runner = made
    blocks = range(1, 1 + MAX_TRANSFER * (MAX_READS + 2))
    copies.submit(plan(1, blocks), runner)
    assert (len(host), runner.most) == (2 * MAX_TRANSFER, MAX_READS)
    copies.collect_all(runner)
    assert len(host) == len(blocks)


def test_a_step_that_loads_blocks_says_nothing_of_computing(made):
    copies, _, runner = made
    tiers, first, second = copies.tiers, plan(1, [1]), plan(2, [])
    copies.submit(first, runner)
    copies.collect(first, runner)
    second.tokens, second.loads = 40, [first.stores[0]]
    assert tiers.fetch([(0, first.stores[0].key)])
    copies.submit(second, runner)
    copies.collect(second, runner)
    assert tiers.costs._token_seconds is None
    second.loads = []
    copies.submit(second, runner)
    copies.collect(second, runner)
    assert tiers.costs._token_seconds is not None


def test_blocks_without_memory_for_their_copies_are_not_stored(made, monkeypatch):
    copies, host, runner = made
    monkeypatch.setattr(runner, "submit", lambda message: fail())
    copies.submit(plan(1, range(1, 4)), runner)
    copies.collect_all(runner)
    assert len(host) == 0


def fail():
    raise OutOfMemory("no memory")
