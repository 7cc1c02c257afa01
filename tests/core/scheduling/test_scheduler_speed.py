"""Planning and settling a step takes under a millisecond, however many wait."""

from __future__ import annotations

import time
from statistics import median

import pytest

from inl.protocol.runner import Limits
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler

ROWS = 512


def milliseconds_of_a_step(waiting):
    limits = Limits(
        slots=ROWS + 1,
        blocks=(40_000,),
        block_size=16,
        max_blocks_per_seq=512,
        vocab=1_000,
    )
    scheduler = Scheduler(limits, SchedulerConfig(token_budget=8_192))
    for number in range(ROWS + waiting):
        scheduler.add(Request([number % 1_000] * 16, max_tokens=1_000))
    scheduler.plan()
    times = []
    for _ in range(64):
        began = time.perf_counter()
        plan = scheduler.plan()
        scheduler.process_outputs([7] * ROWS)
        times.append(1e3 * (time.perf_counter() - began))
        assert (plan.decode_rows, len(plan.chunks)) == (ROWS, ROWS)
    assert len(scheduler.waiting) == waiting
    return median(times)


def test_a_step_of_512_rows_is_planned_quickly_at_any_queue_length(report):
    short, long = milliseconds_of_a_step(10), milliseconds_of_a_step(100_000)
    report(f"512 rows: {short:.2f} ms with 10 waiting, {long:.2f} with 100,000")
    # The aim is 1 ms; the bounds leave room for a slow or busy machine.
    assert short < 4
    assert long == pytest.approx(short, rel=1.0)
