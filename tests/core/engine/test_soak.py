"""100,000 random steps of an engine, and planted faults that change its answers."""

from __future__ import annotations

import pytest

from depth import mostly_full
from inl.errors import ProtocolError
from inl.scheduling.block_pool import BlockPool
from inl.scheduling.kv_cache_manager import KVCacheManager
from inl.scheduling.scheduler import Scheduler
from inl.scheduling.uniforms import mix
from inl.testing.hash_runner import HashRunner
from soak import Parts, WrongText, soak


@pytest.mark.parametrize("seed", mostly_full(range(4)))
def test_every_answer_follows_from_its_ids(seed, report, depth):
    steps, least = depth(5_000, 25_000), depth(10, 50)
    counts = soak(seed, steps)
    figures = ", ".join(f"{counts[name]} {name}" for name in sorted(counts))
    report(f"seed {seed}: {figures}")
    assert counts["steps"] >= steps
    for name in (
        "preemptions",
        "cancelled",
        "prefix hit tokens",
        "stop",
        "length",
        "full requests",
        "masked requests",
    ):
        assert counts[name] > least, name


class EarlyFree(KVCacheManager):
    """Frees at once what a step in flight may still touch."""

    def release(self, table, step):
        self._free(table)


class WideStep(KVCacheManager):
    """Counts a block too many as passed by its window."""

    def before_window(self, group, position):
        passed = super().before_window(group, position)
        return passed + 1 if passed and self.windows[group] > 2 else passed


class EarlyPass(Scheduler):
    """Gives passed blocks back while a step in flight may still read them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        free = self._requests.free_out_of_window

        def early(step, request, *, max_updates):
            last, request.last_step = request.last_step, 0
            free(step, request, max_updates=max_updates)
            request.last_step = last

        self._requests.free_out_of_window = early


class WrongBlock(Scheduler):
    """Tells the runner of another block than the one that it took, now and then."""

    def plan(self):
        plan = super().plan()
        for at, cell in enumerate(plan.block_table_updates):
            if mix(plan.step) % 20 == 0:
                other = cell.block % (self.limits.blocks[cell.group] - 1) + 1
                plan.block_table_updates[at] = cell._replace(block=other)
        return plan


class StalePrefix(BlockPool):
    """Finds a block by its old content after it was given to somebody else."""

    def _evict(self):
        key = self._key_of[next(iter(self._cached))]
        block = super()._evict()
        self._block_of[key] = block
        return block

    def share(self, key):
        block = self._block_of[key]
        if block in self._free:
            self._free.remove(block)
            self._cached[block] = None
        return super().share(key)


class EarlyPublish(Scheduler):
    """Publishes a block once its tokens are scheduled, not when they are collected."""

    def plan(self):
        plan = super().plan()
        for chunk in plan.chunks:
            prefix_cache = self._requests.prefix_cache
            if prefix_cache and chunk.stop <= len(chunk.request.tokens):
                prefix_cache.publish(chunk.request, chunk.stop)
        return plan


class LostFeedback(HashRunner):
    """Forgets now and then which token it chose last."""

    def _run(self, task):
        before = task.seat.last
        super()._run(task)
        if mix(task.flight.step) % 20 == 0:
            task.seat.last = before


class NoMarks(HashRunner):
    """Does not hear which tokens a sequence holds."""

    def _mark(self, message):
        pass


class OnlyPrompts(HashRunner):
    """Counts no token of an answer that it chose itself."""

    def _run(self, task):
        task.decodes = False
        super()._run(task)


@pytest.mark.parametrize(
    "planted",
    [
        {"kv_cache": EarlyFree},
        {"scheduler": WrongBlock},
        {"pool": StalePrefix},
        {"scheduler": EarlyPublish},
        {"runner": LostFeedback},
        {"runner": NoMarks},
        {"runner": OnlyPrompts},
    ],
    ids=lambda planted: next(iter(planted.values())).__name__,
)
def test_a_planted_fault_changes_the_text(planted):
    def worlds():
        for seed in range(4):  # a few may happen to be such that nobody minds
            soak(seed, 5_000, Parts(**planted), world_steps=200)

    with pytest.raises(WrongText):
        worlds()


def test_a_block_that_a_window_still_shows_is_missed():
    with pytest.raises(ProtocolError, match="tokens need"):
        soak(0, 10_000, Parts(kv_cache=WideStep), world_steps=200)


def test_a_passed_block_that_a_step_in_flight_reads_is_missed():
    with pytest.raises(WrongText):
        soak(0, 10_000, Parts(scheduler=EarlyPass), world_steps=200)


def test_an_early_free_shows_only_where_steps_overlap():
    """Why the runner lags at random: in strict order, this fault is invisible."""
    assert soak(0, 3_000, Parts(kv_cache=EarlyFree), lag=False)["steps"] >= 3_000
