"""Answers of an engine that repeats steps on the device."""

from __future__ import annotations

from inl.engine.core import EngineCore
from inl.scheduling.plan import SchedulerConfig


def answers(runner, requests, steps, eos_ids, *, cancel=None):
    """Serve all requests; returns their outputs, the records of all steps, the core.

    cancel: a round, and the request that is cancelled after it.
    """
    seen = []
    config = SchedulerConfig(
        eos_ids=frozenset(eos_ids), decode_steps=steps, repeat_seconds=float("inf")
    )
    core = EngineCore(runner, config, on_step=seen.append)
    for request in requests:
        core.add(request)
    rounds = 0
    while core.has_work:
        assert [event.error for event in core.step() if event.error] == []
        rounds += 1
        if cancel and rounds == cancel[0]:
            core.cancel(requests[cancel[1]].id)
    (pool,) = core.scheduler.kv_cache.pools
    assert pool.used_blocks == 0
    return [(each.output_ids, each.finish_reason) for each in requests], seen, core
