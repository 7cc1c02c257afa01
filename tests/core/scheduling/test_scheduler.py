"""The scheduler without a runner; tests make up the sampled tokens."""

from __future__ import annotations

import pytest

from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Event, Request, Status
from inl.scheduling.scheduler import Scheduler
from inl.spec.message import BlockTableUpdate
from inl.spec.step import Bucket


def spans(plan):
    return [(chunk.request.id, chunk.start, chunk.stop) for chunk in plan.chunks]


def turn(scheduler, token=7):
    """Plan a step and process its outputs immediately."""
    plan = scheduler.plan()
    events = (
        scheduler.process_outputs([token] * len(plan.chunks)) if plan.chunks else []
    )
    return spans(plan), events


def added(scheduler, *requests):
    for request in requests:
        scheduler.add(request)
    return requests


def test_a_long_prompt_is_split_across_steps(small):
    scheduler = Scheduler(small(), SchedulerConfig(token_budget=6))
    added(scheduler, Request(range(10)))
    assert spans(scheduler.plan()) == [(1, 0, 6)]
    assert spans(scheduler.plan()) == [(1, 6, 10)]
    assert spans(scheduler.plan()) == [(1, 10, 11)]


def test_only_the_last_chunk_of_a_prompt_gives_a_token(small):
    scheduler = Scheduler(small(), SchedulerConfig(token_budget=6))
    (request,) = added(scheduler, Request(range(10), max_tokens=2))
    assert turn(scheduler, 50) == ([(1, 0, 6)], [])
    assert turn(scheduler, 51) == ([(1, 6, 10)], [Event(1, 51)])
    assert turn(scheduler, 52) == ([(1, 10, 11)], [Event(1, 52, "length")])
    assert request.output_ids == [51, 52]
    assert request.status is Status.FINISHED


def test_decoding_rows_come_first_and_prompts_share_the_rest(small):
    scheduler = Scheduler(small(blocks=(99,)), SchedulerConfig(token_budget=8))
    added(scheduler, Request([1, 2]), Request([3]))
    turn(scheduler)
    added(scheduler, Request(range(9)), Request([4, 5]))
    plan = scheduler.plan()
    assert spans(plan) == [(1, 2, 3), (2, 1, 2), (3, 0, 6)]
    assert (plan.decode_rows, plan.tokens, plan.bucket) == (2, 8, Bucket(8, 3))
    plan = scheduler.plan()
    assert spans(plan) == [(1, 3, 4), (2, 2, 3), (3, 6, 9), (4, 0, 2)]


def test_a_long_prompt_does_not_delay_decoding(small):
    scheduler = Scheduler(
        small(blocks=(100,), max_blocks_per_seq=50), SchedulerConfig(token_budget=4)
    )
    added(scheduler, Request([1], max_tokens=30))
    turn(scheduler)
    added(scheduler, Request(range(60)))
    for position in range(1, 21):
        assert turn(scheduler)[0][0] == (1, position, position + 1)
    assert scheduler.running[2].scheduled == 60


def test_short_requests_do_not_overtake_a_long_one(small):
    scheduler = Scheduler(
        small(slots=3, blocks=(100,), max_blocks_per_seq=50),
        SchedulerConfig(token_budget=8),
    )
    added(scheduler, Request([1], max_tokens=3), Request([2], max_tokens=3))
    turn(scheduler)
    added(scheduler, Request(range(90), max_tokens=1))
    ended = []
    for _ in range(40):
        added(scheduler, Request([3], max_tokens=1))
        ended += [event.request for event in turn(scheduler)[1] if event.finish_reason]
    assert ended[:3] == [1, 2, 3]
    assert ended == sorted(ended)


def test_tokens_ahead_of_the_limit_are_not_scheduled(small):
    scheduler = Scheduler(small())
    added(scheduler, Request([1, 2], max_tokens=2))
    assert spans(scheduler.plan()) == [(1, 0, 2)]
    assert spans(scheduler.plan()) == [(1, 2, 3)]
    assert scheduler.plan().chunks == []


def test_tokens_after_a_stop_token_are_discarded(small):
    scheduler = Scheduler(small(), SchedulerConfig(eos_ids=frozenset({9})))
    (request,) = added(scheduler, Request([1, 2]))
    scheduler.plan()
    assert spans(scheduler.plan()) == [(1, 2, 3)]
    assert scheduler.process_outputs([9]) == [Event(1, 9, "stop")]
    assert scheduler.kv_cache.available_blocks == 7
    assert scheduler.process_outputs([33]) == []
    assert scheduler.kv_cache.available_blocks == 8
    assert request.output_ids == [9]


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({}, [9]),
        ({"ignore_eos": True}, [9, 8, 9]),
        ({"ignore_eos": True, "stop_ids": frozenset({8})}, [9, 8]),
    ],
)
def test_ignoring_end_tokens_keeps_the_requests_own(small, fields, answer):
    scheduler = Scheduler(small(), SchedulerConfig(eos_ids=frozenset({9})))
    (request,) = added(scheduler, Request([1], max_tokens=3, **fields))
    for token in (9, 8, 9):
        turn(scheduler, token)
    assert request.output_ids == answer


def test_the_output_ends_with_the_context(small):
    scheduler = Scheduler(small(), SchedulerConfig(context=4))
    (request,) = added(scheduler, Request([1, 2], max_tokens=50))
    turn(scheduler)
    assert turn(scheduler)[1] == [Event(1, 7, "length")]
    assert len(request.tokens) == 4


def test_plans_have_admissions_updates_and_releases(small):
    scheduler = Scheduler(small(blocks=(9, 9)))
    (request,) = added(scheduler, Request([1, 2, 3, 4], max_tokens=2))
    first, second = scheduler.plan(), scheduler.plan()
    assert [(a.request.slot, a.length) for a in first.admissions] == [(1, 0)]
    assert (first.block_table_updates, second.admissions) == ([], [])
    assert second.block_table_updates == [
        BlockTableUpdate(0, 1, 1, 2),
        BlockTableUpdate(1, 1, 1, 2),
    ]
    assert request.block_table == [[1, 2], [1, 2]]
    scheduler.process_outputs([7])
    scheduler.process_outputs([7])
    last = scheduler.plan()
    assert (last.releases, last.chunks, last.step) == ([1], [], 0)
    assert not scheduler.has_releases


def test_steps_use_existing_programs(small):
    sizes = [(1, 1), (4, 4), (16, 4)]
    programs = tuple(
        Bucket(*size, sampler=name) for size in sizes for name in ("greedy", "sample")
    )
    scheduler = Scheduler(small(buckets=programs))
    added(scheduler, Request(range(18)))
    assert scheduler.plan().bucket == Bucket(16, 4)
    assert scheduler.plan().bucket == Bucket(16, 4)  # two tokens of one row
    assert scheduler.plan().bucket == Bucket(1, 1)
    added(scheduler, Request([1], temperature=0.5))
    assert scheduler.plan().bucket == Bucket(4, 4, sampler="sample")


def test_rows_are_limited_by_slots_config_and_programs(small):
    for changes, policy, rows in (
        ({}, SchedulerConfig(), 4),
        ({}, SchedulerConfig(max_rows=2), 2),
        ({"buckets": (Bucket(8, 3, sampler="sample"),)}, SchedulerConfig(), 3),
    ):
        scheduler = Scheduler(small(**changes), policy)
        added(scheduler, *(Request([1]) for _ in range(6)))
        assert len(scheduler.plan().chunks) == rows
        assert len(scheduler.waiting) == 6 - rows


class TestPrefixCache:
    def prompts(self, scheduler, *prompts, **fields):
        for prompt in prompts:
            added(scheduler, Request(prompt, max_tokens=1, **fields))
            while scheduler.running or len(scheduler.waiting):
                turn(scheduler)
        return scheduler.prefix_hit_tokens

    def test_full_blocks_are_shared_with_later_requests(self, small):
        assert self.prompts(Scheduler(small()), range(10), [*range(8), 50, 51]) == 8

    def test_the_last_token_is_computed_again(self, small):
        assert self.prompts(Scheduler(small()), range(8), range(8)) == 4

    def test_outputs_are_shared_too(self, small):
        scheduler = Scheduler(small())
        added(scheduler, Request([1, 2, 3], max_tokens=4))
        for _ in range(4):
            turn(scheduler)
        assert self.prompts(scheduler, [1, 2, 3, 7, 7, 7, 7]) == 4

    def test_running_requests_share_what_is_collected_and_no_more(self, small):
        scheduler = Scheduler(small(blocks=(99,)))
        added(scheduler, Request(range(9)), Request(range(9)))
        assert spans(scheduler.plan()) == [(1, 0, 9), (2, 0, 9)]
        added(scheduler, Request(range(9)))
        assert spans(scheduler.plan())[-1] == (3, 0, 9)
        scheduler.process_outputs([7, 7])
        added(scheduler, Request(range(9)))
        assert spans(scheduler.plan())[-1] == (4, 8, 9)

    def burst(self, small, *prompts, **policy):
        """A scheduler whose first step is planned, and its requests."""
        config = SchedulerConfig(**{"wait_tokens": 8, **policy})
        scheduler = Scheduler(small(blocks=(99,)), config)
        requests = added(scheduler, *(Request(each) for each in prompts))
        return scheduler, requests, spans(scheduler.plan())

    def test_a_burst_computes_its_prefix_once(self, small):
        prompts = [[*range(8), last] for last in (50, 51, 52)]
        scheduler, _, first = self.burst(small, *prompts)
        assert first == [(1, 0, 9)]
        assert spans(scheduler.plan()) == [(1, 9, 10)]
        scheduler.process_outputs([7])
        assert spans(scheduler.plan()) == [(1, 10, 11), (2, 8, 9), (3, 8, 9)]
        assert scheduler.prefix_hit_tokens == 16

    @pytest.mark.parametrize("policy", [{"wait_tokens": 9}, {"prefix_cache": False}])
    def test_a_short_prefix_is_not_waited_for(self, small, policy):
        *_, first = self.burst(small, range(9), range(9), **policy)
        assert first == [(1, 0, 9), (2, 0, 9)]

    def test_less_than_half_a_prompt_is_not_waited_for(self, small):
        other = [*range(8), *range(30, 39)]
        *_, first = self.burst(small, range(9), other)
        assert first == [(1, 0, 9), (2, 0, 17)]
        *_, first = self.burst(small, range(9), other[:-1])
        assert first == [(1, 0, 9)]

    def test_another_salt_is_not_waited_for(self, small):
        scheduler = Scheduler(small(blocks=(99,)), SchedulerConfig(wait_tokens=1))
        added(scheduler, Request(range(9)), Request(range(9), cache_salt="another"))
        assert spans(scheduler.plan()) == [(1, 0, 9), (2, 0, 9)]

    def test_the_wait_ends_with_the_step_if_nothing_was_published(self, small):
        scheduler, (first, _), _ = self.burst(small, range(9), range(9))
        scheduler.finish(first, "cancelled")
        assert spans(scheduler.plan()) == []
        scheduler.process_outputs([7])
        assert spans(scheduler.plan()) == [(2, 0, 9)]

    def test_blocks_are_shared_only_between_equal_salts(self, small):
        scheduler = Scheduler(small())
        self.prompts(scheduler, range(10))
        assert self.prompts(scheduler, range(10), cache_salt="another") == 0
        assert self.prompts(scheduler, range(10), cache_salt="another") == 8
        assert self.prompts(scheduler, range(10)) == 16

    def test_it_can_be_turned_off(self, small):
        scheduler = Scheduler(small(), SchedulerConfig(prefix_cache=False))
        assert self.prompts(scheduler, range(10), range(10)) == 0

    def test_a_preempted_request_reuses_its_cached_blocks(self, small):
        scheduler = Scheduler(small(blocks=(6,)))
        first, second = added(
            scheduler, Request(range(4), max_tokens=9), Request(range(20, 28))
        )
        while second.status is not Status.WAITING or not first.output_ids:
            turn(scheduler)
        while second.status is not Status.RUNNING:
            turn(scheduler)
        assert scheduler.preemptions == 1
        assert second.cached_tokens == 8


class TestPreemption:
    def crowded(self, small):
        """Two requests that both need a third block of four when they decode."""
        scheduler = Scheduler(small(blocks=(5,)), SchedulerConfig(prefix_cache=False))
        first, second = added(
            scheduler, Request([1] * 4, max_tokens=9), Request([2] * 3, max_tokens=9)
        )
        return scheduler, first, second

    def test_the_latest_arrival_is_preempted_and_keeps_its_output(self, small):
        scheduler, first, second = self.crowded(small)
        ended = []
        while not scheduler.preemptions:
            ended += turn(scheduler)[1]
        assert (first.status, second.status) == (Status.RUNNING, Status.WAITING)
        assert (second.block_table, second.slot) == ([], 0)
        kept = list(second.output_ids)
        assert kept
        while second.status is not Status.RUNNING:
            ended += turn(scheduler)[1]
        assert second.tokens == [2] * 3 + second.output_ids
        assert second.output_ids[: len(kept)] == kept
        assert second.prefill_len >= 3 + len(kept)
        while second.status is Status.RUNNING:
            ended += turn(scheduler)[1]
        assert [event.request for event in ended if event.finish_reason] == [1, 2]
        assert (len(first.output_ids), len(second.output_ids)) == (9, 9)

    def test_tokens_in_flight_of_a_preempted_request_count(self, small):
        scheduler, _, second = self.crowded(small)
        scheduler.plan()
        while not scheduler.preemptions:
            scheduler.plan()
            if len(scheduler.in_flight) > 1 and not scheduler.preemptions:
                scheduler.process_outputs([7] * len(scheduler.in_flight[0].chunks))
        known, flying = len(second.tokens), second.in_flight
        assert flying
        assert scheduler.kv_cache.has_pending_frees
        while scheduler.in_flight:
            scheduler.process_outputs([7] * len(scheduler.in_flight[0].chunks))
        assert len(second.tokens) == known + flying
        assert not scheduler.kv_cache.has_pending_frees

    def test_preempted_requests_precede_new_ones(self, small):
        scheduler, _, _ = self.crowded(small)
        (third,) = added(scheduler, Request([3], max_tokens=1))
        while not scheduler.preemptions:
            turn(scheduler)
        assert third.status is Status.WAITING
        order = []
        while third.status is not Status.FINISHED:
            order += [number for number, start, _ in turn(scheduler)[0] if start == 0]
        assert order == [2, 3]

    def test_a_preempted_request_waits_for_its_steps_in_flight(self, small):
        scheduler = Scheduler(small(blocks=(99,)))
        _, second = added(scheduler, Request(range(8)), Request(range(20, 28)))
        scheduler.plan()
        scheduler.preempt(second)
        assert spans(scheduler.plan()) == [(1, 8, 9)]
        scheduler.process_outputs([50, 51])
        assert spans(scheduler.plan()) == [(1, 9, 10), (2, 0, 9)]
        assert second.tokens[8:] == [51]

    def test_one_block_is_spared_per_running_request(self, small):
        scheduler = Scheduler(small(blocks=(5,)))
        added(scheduler, Request([1]), Request([2]), Request([3]))
        assert spans(scheduler.plan()) == [(1, 0, 1), (2, 0, 1)]
        assert scheduler.kv_cache.available_blocks == 2


class TestFinish:
    def test_blocks_of_a_finished_request_are_freed_after_its_steps(self, small):
        scheduler = Scheduler(small())
        (request,) = added(scheduler, Request(range(4)))
        scheduler.plan()
        assert scheduler.finish(request, "cancelled") == Event(1, None, "cancelled")
        assert scheduler.kv_cache.available_blocks == 7
        assert scheduler.plan().releases == [1]
        assert scheduler.process_outputs([5]) == []
        assert scheduler.kv_cache.available_blocks == 8
        assert request.output_ids == []

    def test_a_finished_waiting_request_is_skipped(self, small):
        scheduler = Scheduler(small(slots=2))
        one, two, three = added(
            scheduler, *(Request([n], max_tokens=1) for n in (1, 2, 3))
        )
        turn(scheduler)
        scheduler.finish(two, "cancelled")
        assert len(scheduler.waiting) == 1
        assert turn(scheduler)[0] == [(three.id, 0, 1)]
        assert len(scheduler.waiting) == 0
        assert one.status is Status.FINISHED

    def test_blocks_in_use_by_a_step_in_flight_are_not_reallocated(self, small):
        scheduler = Scheduler(small(blocks=(3,)))
        one, two = added(scheduler, Request(range(7)), Request(range(7)))
        scheduler.plan()
        held = one.block_table[0]
        scheduler.finish(one, "cancelled")
        assert scheduler.plan().chunks == []
        scheduler.process_outputs([5])
        assert spans(scheduler.plan()) == [(2, 0, 7)]
        assert sorted(two.block_table[0]) == sorted(held)


class TestWithoutCache:
    def scheduler(self, small, **policy):
        return Scheduler(small(), SchedulerConfig(use_kv_cache=False, **policy))

    def test_every_token_computes_the_whole_sequence(self, small):
        scheduler = self.scheduler(small)
        added(scheduler, Request([1, 2, 3], max_tokens=3))
        plans = []
        while not plans or scheduler.running:
            plans.append(scheduler.plan())
            scheduler.process_outputs([7])
        assert [spans(plan) for plan in plans] == [
            [(1, 0, 3)],
            [(1, 0, 4)],
            [(1, 0, 5)],
        ]
        assert [len(plan.admissions) for plan in plans] == [1, 1, 1]
        assert [plan.admissions[0].length for plan in plans] == [0, 0, 0]
        assert [plan.decode_rows for plan in plans] == [0, 0, 0]

    def test_nothing_is_planned_ahead_of_a_token(self, small):
        scheduler = self.scheduler(small)
        added(scheduler, Request([1, 2, 3]))
        scheduler.plan()
        assert scheduler.plan().chunks == []

    def test_a_sequence_over_the_budget_is_split(self, small):
        scheduler = self.scheduler(small, token_budget=4)
        added(scheduler, Request([1] * 5, max_tokens=2))
        found = []
        while not found or scheduler.running:
            found += turn(scheduler)[0]
        assert found == [(1, 0, 4), (1, 4, 5), (1, 0, 4), (1, 4, 6)]

    def test_nothing_is_shared(self, small):
        scheduler = self.scheduler(small)
        added(scheduler, *(Request(range(9), max_tokens=1) for _ in range(2)))
        while scheduler.running or len(scheduler.waiting):
            turn(scheduler)
        assert scheduler.prefix_hit_tokens == 0
        assert scheduler.kv_cache.pools[0].cached_blocks == 0


@pytest.mark.parametrize(("max_tokens", "together"), [(2, 2), (3, 1)])
def test_no_block_is_spared_for_a_request_that_does_not_grow(
    small, max_tokens, together
):
    """Four blocks of 4 cells: two of 7 tokens fit if neither computes a ninth."""
    scheduler = Scheduler(small(blocks=(5,)), SchedulerConfig(prefix_cache=False))
    added(scheduler, *(Request(range(7), max_tokens=max_tokens) for _ in "ab"))
    assert len(spans(scheduler.plan())) == together
