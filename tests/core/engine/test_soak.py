"""Random steps of an engine, and planted faults that change its answers."""

from __future__ import annotations

import pytest

from depth import mostly_full
from inl.engine.reply_check import read_hidden
from inl.errors import ProtocolError, RequestError
from inl.kv.block_pool import BlockPool
from inl.kv.kv_cache_manager import KVCacheManager
from inl.kv.prefix_cache import PrefixCache
from inl.scheduling.scheduler import Scheduler
from inl.spec.uniforms import mix
from inl.speculation.planner import Speculation
from inl.testing.hash_runner import HashRunner
from soak import Parts, WrongText, soak
from toy_guide import ToyGuide


@pytest.mark.parametrize("seed", mostly_full((0, 1, 3, 4)))
def test_outputs_match_the_oracle(seed, report, depth):
    steps, least = depth(2_500, 5_000, 25_000), depth(5, 0, 20)
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
        "guided requests",
        "further samples",
        "scored prompt tokens",
        "deadline",
    ):
        assert counts[name] > least, name


def test_outputs_match_the_oracle_while_adapters_come_and_go(report, depth):
    steps = depth(1_500, 4_000, 25_000)
    counts = soak(9, steps, Parts(adapters=True), world_steps=300)
    report(f"{counts['adapters']} adapters, {counts['requests of adapters']} requests")
    for name in ("preemptions", "prefix hit tokens", "adapters"):
        assert counts[name] > 5, name
    assert counts["requests of adapters"] > 50


@pytest.mark.parametrize(
    "more", [{}, {"speculation": Speculation}, {"repeats": True}], ids=lambda m: [*m]
)
def test_pooled_requests_match_the_oracle_among_others(more, report, depth):
    steps = depth(1_500, 4_000, 25_000)
    counts = soak(5, steps, Parts(adapters=True, pooled=True, **more), world_steps=200)
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for name in ("cancelled", "length", "hidden states", "cached hidden states"):
        assert counts[name] > 5, name
    assert counts["preemptions"] > 0


def test_hidden_states_of_other_rows_are_found(monkeypatch):
    def of_other_rows(reply, plan):
        return read_hidden(reply, plan)[::-1]

    monkeypatch.setattr("inl.engine.core.read_hidden", of_other_rows)
    with pytest.raises(WrongText):
        soak(2, 2_000, Parts(pooled=True), world_steps=200)


class EarlyFree(KVCacheManager):
    """Frees blocks that a step in flight may still access."""

    def release(self, table, step):
        self._free(table)


class WideStep(KVCacheManager):
    """Counts one block too many as outside the window."""

    def before_window(self, group, position):
        passed = super().before_window(group, position)
        return passed + 1 if passed and self.windows[group] > 2 else passed


class EarlyWindowFree(Scheduler):
    """Frees blocks outside the window while a step in flight may still read them."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        free = self._requests.free_out_of_window

        def early(step, request, *, max_updates):
            last, request.last_step = request.last_step, 0
            free(step, request, max_updates=max_updates)
            request.last_step = last

        self._requests.free_out_of_window = early


class WrongBlock(Scheduler):
    """Sends a wrong block in some block table updates."""

    def plan(self):
        plan = super().plan()
        for at, cell in enumerate(plan.block_table_updates):
            if mix(plan.step) % 20 == 0:
                other = cell.block % (self.limits.blocks[cell.group] - 1) + 1
                plan.block_table_updates[at] = cell._replace(block=other)
        return plan


class StalePrefix(BlockPool):
    """Finds an evicted block by the key of its old content."""

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
    """Publishes blocks when their tokens are scheduled, not when they are collected."""

    def plan(self):
        plan = super().plan()
        for chunk in plan.chunks:
            prefix_cache = self._requests.prefix_caches[0]
            if prefix_cache and chunk.stop <= len(chunk.request.tokens):
                prefix_cache.publish(chunk.request, chunk.stop)
        return plan


class AcrossAdapters(PrefixCache):
    """Shares a prefix across adapters: keys have no digest."""

    def keys(self, request, count):
        digest, request.adapter_digest = request.adapter_digest, self.wrong(request)
        found = super().keys(request, count)
        request.adapter_digest = digest
        return found

    def wrong(self, _request):
        return ""


class ByNumber(AcrossAdapters):
    """Shares a prefix with an adapter that had the same number before."""

    def wrong(self, request):
        return str(request.adapter)


class NoCopy(Scheduler):
    """Shares the last, partly filled block of a prompt between its samples."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        admit = self._requests.try_admit

        def share(request, growing, rank):
            admitted = admit(request, growing, rank)
            at = request.prompt_tokens // self.limits.block_size
            for other in self.running.values() if admitted else ():
                same = request.sample_group and other is not request
                if same and request.sample_group == other.sample_group:
                    self.share_block(request, other, at)
                    break
            return admitted

        self._requests.try_admit = share

    def share_block(self, request, other, at):
        tables = zip(
            self.kv_cache.pools, request.block_table, other.block_table, strict=True
        )
        for pool, mine, others in tables:
            if at < min(len(mine), len(others)) and mine[at] and others[at]:
                pool._ref_counts[others[at]] += 1
                pool.free([mine[at]])
                mine[at] = others[at]


class LateMask(Scheduler):
    """Computes masks from the output without its last token."""

    def add(self, request):
        if request.guide is not None:
            request.guide = LateGuide(request.guide.grammar)
        return super().add(request)


class LateGuide(ToyGuide):
    def masks(self, drafts=()):
        late = ToyGuide(self.grammar)
        late.output = self.output[:-1]
        return late.masks(drafts)


class LostForced(Scheduler):
    """Computes only the last of several forced tokens."""

    def process_outputs(self, *args):
        events = super().process_outputs(*args)
        for request in self.running.values():
            if request.prompt_tokens < request.scheduled < request.prefill_len - 1:
                request.scheduled += 1
        return events


class LostFeedback(HashRunner):
    """Loses the last sampled token in some steps."""

    def _compute(self, task):
        before = task.state.last
        super()._compute(task)
        if mix(task.step.number) % 20 == 0:
            task.state.last = before


class NoMarks(HashRunner):
    """Ignores token bias frames."""

    def _set_token_bias(self, message):
        pass


class OnlyPrompts(HashRunner):
    """Does not count the tokens that it sampled."""

    def _compute(self, task):
        task.decodes = False
        super()._compute(task)


FOUND = WrongText, RequestError
"""A wrong answer, or a token that a grammar does not allow."""


@pytest.mark.parametrize(
    "planted",
    [
        {"kv_cache": EarlyFree},
        {"scheduler": WrongBlock},
        {"pool": StalePrefix},
        pytest.param({"scheduler": EarlyPublish}, marks=pytest.mark.full),
        {"scheduler": NoCopy},
        {"scheduler": LateMask},
        {"scheduler": LostForced},
        {"runner": LostFeedback},
        {"runner": NoMarks},
        {"runner": OnlyPrompts},
    ],
    ids=lambda planted: next(iter(planted.values())).__name__,
)
def test_planted_faults_change_the_output(planted):
    def worlds():
        for seed in range(4):  # a few seeds may not show the fault
            soak(seed, 5_000, Parts(**planted), world_steps=200)

    with pytest.raises(FOUND):
        worlds()


@pytest.mark.parametrize("fault", [AcrossAdapters, ByNumber])
def test_a_prefix_shared_across_adapters_is_detected(fault, monkeypatch):
    monkeypatch.setattr("inl.scheduling.running_requests.PrefixCache", fault)
    with pytest.raises(WrongText):
        soak(0, 10_000, Parts(adapters=True), world_steps=200)


@pytest.mark.full
def test_freeing_a_block_inside_the_window_is_detected():
    with pytest.raises(ProtocolError, match="tokens need"):
        soak(0, 10_000, Parts(kv_cache=WideStep), world_steps=200)


@pytest.mark.full
def test_freeing_a_block_in_use_by_a_step_in_flight_is_detected():
    with pytest.raises(WrongText):
        soak(4, 10_000, Parts(scheduler=EarlyWindowFree), world_steps=200)


@pytest.mark.full
def test_an_early_free_is_visible_only_if_steps_overlap():
    """The reason for the random lag: in strict order, this fault is invisible."""
    assert soak(0, 3_000, Parts(kv_cache=EarlyFree), lag=False)["steps"] >= 3_000
