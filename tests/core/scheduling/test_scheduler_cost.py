"""The cost of a step is independent of the number of waiting requests."""

from __future__ import annotations

import gc
import sys

from inl.protocol.runner import Limits
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler

ROWS = 64


def calls_of_a_step(waiting):
    """Count function calls while one full step is planned and its tokens processed."""
    limits = Limits(
        slots=ROWS + 1,
        blocks=(5_000,),
        block_size=16,
        max_blocks_per_seq=512,
        vocab=1_000,
    )
    scheduler = Scheduler(limits, SchedulerConfig(token_budget=8_192))
    for number in range(ROWS + waiting):
        scheduler.add(Request([number % 1_000] * 16, max_tokens=1_000))
    scheduler.plan()
    events = []
    gc.disable()  # its callbacks are calls
    sys.setprofile(lambda _frame, event, _argument: events.append(event))
    try:
        plan = scheduler.plan()
        scheduler.process_outputs([7] * ROWS)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert (plan.decode_rows, len(plan.chunks)) == (ROWS, ROWS)
    assert len(scheduler.waiting) == waiting
    return sum(event in ("call", "c_call") for event in events)


def test_waiting_requests_cost_nothing():
    few, many = calls_of_a_step(10), calls_of_a_step(10_000)
    assert few == many
    assert few < 150 * ROWS, "calls for each row"
