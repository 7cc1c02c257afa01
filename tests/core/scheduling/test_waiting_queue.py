"""Priorities, fair shares between keys, and deadlines."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.engine.core import EngineCore
from inl.errors import RequestError
from inl.protocol.runner import Limits
from inl.scheduling.fair_shares import MAX_IDLE_KEYS, FairShares
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request, Status
from inl.scheduling.scheduler import Scheduler
from inl.scheduling.waiting_queue import HEAD_START, WaitingQueue
from inl.testing.hash_runner import HashRunner

LIMITS = Limits(
    slots=4, blocks=(100,), block_size=4, max_blocks_per_seq=16, vocab=97, depth=1
)
MOST = 30
"""Tokens of the longest request below."""


def engine(limits=LIMITS, clock=time.time, **config):
    scheduler = Scheduler(limits, SchedulerConfig(**config), clock=clock)
    return EngineCore(HashRunner(limits), scheduler=scheduler)


def started(core, requests):
    """Add requests and return their indices in the order in which they start."""
    for request in requests:
        core.add(request)
    order = []
    while core.has_work:
        core.step()
        for index, request in enumerate(requests):
            if index not in order and request.output_ids:
                order.append(index)
    return order


def test_without_keys_and_priorities_requests_start_in_order_of_arrival():
    requests = [Request([1, 2], max_tokens=1 + each % 3) for each in range(9)]
    assert started(engine(max_rows=1), requests) == list(range(9))


def test_higher_priorities_start_first():
    levels = [0, 1, 0, 5, -1, 5]
    requests = [Request([1], max_tokens=2, priority=level) for level in levels]
    assert started(engine(max_rows=1), requests) == [3, 5, 1, 0, 2, 4]


@given(st.integers(1, 5), st.integers(1, 5))
def test_no_priority_starves_another(low, gap):
    """A request is overtaken by no more than HEAD_START arrivals per level."""
    queue, waiting = WaitingQueue(), Request([1], priority=low - 5)
    queue.push(waiting, 1)
    arrival = 1
    while True:
        arrival += 1
        queue.push(Request([1], priority=low - 5 + gap), arrival)
        if queue.pop() is waiting:
            break
    assert arrival <= 2 + HEAD_START * gap


@examples(6, 12, 80)
@given(st.data(), st.integers(2, 4), st.integers(1, 3))
def test_waiting_keys_get_equal_shares(data, keys, rows):
    """Whatever the lengths, the shares of keys with waiting requests stay close."""
    names = [f"key {index}" for index in range(keys)]
    core = engine(max_rows=rows, token_budget=64, prefix_cache=False)
    requests = {name: [] for name in names}
    lengths = data.draw(st.lists(st.integers(1, MOST // 2), min_size=30, max_size=60))
    for index, name in enumerate(names):
        # One key asks for much more, in longer requests, and first.
        for length in lengths if index else lengths * 3:
            size = MOST // 2 if not index else length
            request = Request([7] * size, max_tokens=length, key=name, ignore_eos=True)
            core.add(request)
            requests[name].append(request)
    queued = True
    while queued:
        core.step()
        queued = all(
            any(each.status is Status.WAITING for each in requests[name])
            for name in names
        )
        served = [sum(map(computed, requests[name])) for name in names]
        assert not queued or max(served) - min(served) <= (rows + 1) * MOST


def computed(request):
    """Tokens computed for a request."""
    finished = request.status is Status.FINISHED
    return len(request.tokens) - 1 if finished else request.scheduled


def test_a_key_that_returns_is_not_credited_for_its_absence():
    shares = FairShares()
    shares.add("busy")
    shares.charge("busy", 1_000)
    assert shares.first() == "busy"
    shares.choose("busy")
    shares.add("late")
    assert shares.counter("late") == shares.counter("busy") == 1_000
    shares.charge("busy", 1)
    assert shares.first() == "late"


def test_a_key_that_has_used_its_share_waits_for_the_others():
    core = engine(max_rows=1, prefix_cache=False)
    first = [Request([1] * 20, max_tokens=9, key="a") for _ in range(5)]
    second = [Request([1] * 20, max_tokens=9, key="b") for _ in range(5)]
    order = started(core, [*first, *second])
    names = ["a" if index < 5 else "b" for index in order]
    assert Counter(names[:4]) == {"a": 2, "b": 2}
    assert Counter(names[:8]) == {"a": 4, "b": 4}


def test_the_counters_of_keys_are_bounded():
    shares = FairShares()
    for index in range(5 * MAX_IDLE_KEYS):
        shares.add(f"key {index}")
        assert shares.first() == f"key {index}"
        shares.choose(f"key {index}")
        shares.remove_first()
        shares.charge(f"key {index}", 1 + index % 7)
    assert len(shares) <= 2 * MAX_IDLE_KEYS + 2


def test_a_deadline_ends_waiting_and_running_requests():
    now = [100.0]
    core = engine(clock=lambda: now[0], max_rows=1)
    running = Request([1], max_tokens=50, deadline=110.0)
    waiting = Request([2], max_tokens=50, deadline=110.5)
    patient = Request([3], max_tokens=3)
    numbers = [core.add(each) for each in (running, waiting, patient)]
    for _ in range(5):
        core.step()
    now[0] = 111.0
    ended = [event for event in core.step() if event.finish_reason]
    assert [(each.request, each.finish_reason) for each in ended[:2]] == [
        (numbers[0], "deadline"), (numbers[1], "deadline"),
    ]  # fmt: skip
    assert len(running.output_ids) == 5
    assert waiting.output_ids == []
    while core.has_work:
        core.step()
    assert patient.finish_reason == "length"
    assert core.scheduler.kv_cache.pools[0].used_blocks == 0
    assert core.runner.slots_in_use == []


BAD = [
    ({"deadline": 99.5}, r"deadline: found 99.500, which passed 0.500 seconds ago, "
     r"accepts a Unix time in the future"),
    ({"deadline": float("nan")}, "deadline: found nan, accepts None or a Unix time"),
    ({"deadline": "soon"}, "deadline: found 'soon', accepts None or a Unix time"),
    ({"priority": 101}, "priority: found 101, accepts at most 100"),
    ({"priority": -101}, "priority: found -101, accepts -100 and above"),
    ({"priority": 1.5}, "priority: found 1.5, accepts an int"),
    ({"key": 7}, "key: found 7, accepts a string of up to 256 characters"),
    ({"key": "k" * 257}, "accepts a string of up to 256 characters"),
    ({"prompt_logprobs": 21}, "prompt_logprobs: found 21, accepts None, or"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "sentence"), BAD)
def test_bad_values_are_refused_and_nothing_is_lost(fields, sentence):
    core = engine(clock=lambda: 100.0)
    kept = Request([1, 2, 3], max_tokens=4)
    core.add(kept)
    with pytest.raises(RequestError, match=sentence):
        core.add(Request([1], **fields))
    while core.has_work:
        core.step()
    assert (kept.finish_reason, len(kept.output_ids)) == ("length", 4)
