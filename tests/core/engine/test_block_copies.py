"""When blocks that the device evicts are read back: never before their step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inl.engine import block_copies
from inl.engine.block_copies import BlockCopies
from inl.engine.core import EngineCore
from inl.errors import OutOfMemory
from inl.kv.tier import BlockMove
from inl.kv_tiers import tiers as tiers_module
from inl.kv_tiers.tiers import BlockTiers, Costs
from inl.protocol.runner import MAX_READS
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
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


class Slow(HashRunner):
    """A runner on a clock of its own: writes of blocks and steps take seconds."""

    now = write_seconds = 0.0
    step_seconds = 1.0

    def write_blocks(self, message, blocks, each=map):
        Slow.now += self.write_seconds * len(blocks)
        super().write_blocks(message, blocks, each)

    def collect(self):
        Slow.now += self.step_seconds
        return super().collect()


def test_a_prefix_is_read_where_that_was_faster_by_the_clock(monkeypatch):
    """Through the engine: whatever a tier takes, the second time is the faster way."""
    clock = SimpleNamespace(perf_counter=lambda: Slow.now)
    monkeypatch.setattr(block_copies, "time", clock)
    monkeypatch.setattr(tiers_module, "time", clock)
    runner = Slow(Limits(5, (25,), 4, 24, 100, depth=2))
    tiers = BlockTiers(Costs(), host_bytes=1 << 20)
    config = SchedulerConfig(token_budget=64)
    core = EngineCore(runner, config, tiers=tiers)
    prompts = [[turn, *range(1, 48)] for turn in range(9)]

    def cached(prompt):
        request = Request(prompt, max_tokens=1)
        core.add(request)
        while core.has_work:
            core.step()
        return request.cached_tokens

    assert [cached(prompt) for prompt in prompts] == [0] * 9  # 48 tokens a second
    runner.write_seconds = 1.0
    assert cached(prompts[0]) == 44  # not measured yet: 11 seconds
    assert [cached(prompt) for prompt in prompts[1:5]] == [0] * 4
    refused = 5
    while not cached(prompts[refused % 9]):
        refused += 1
    assert 100 < refused < 1000  # it is tried again, much later
    runner.write_seconds = 0.001
    for _ in range(40):
        tiers.costs.loaded("host", 11, 0.011)
    assert [cached(prompt) for prompt in prompts[::-1]].count(44) >= 7


def test_blocks_without_memory_for_their_copies_are_not_stored(made, monkeypatch):
    copies, host, runner = made
    monkeypatch.setattr(runner, "submit", lambda message: fail())
    copies.submit(plan(1, range(1, 4)), runner)
    copies.collect_all(runner)
    assert len(host) == 0


def fail():
    raise OutOfMemory("no memory")
