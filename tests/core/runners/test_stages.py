"""Pipelines of hash runners: texts, lanes, and faults that change the texts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from depth import mostly_full
from hash_stages import HashPipeline, HashStage
from inl.engine.core import EngineCore
from inl.errors import RequestError, RunnerError, WorkerLost
from inl.runners.returned_tokens import ReturnedTokens, StepTokens
from inl.scheduling.lanes import in_lane
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.spec.message import ADMIT, STEP, header
from inl.speculation.planner import Speculation
from soak import Parts, WrongText, soak

LIMITS = Limits(
    slots=9, blocks=(80,), block_size=4, max_blocks_per_seq=12, vocab=97, depth=3,
    stages=2,
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    mostly_full([
        (2, {}), (3, {}), (2, {"speculation": Speculation}),
        (2, {"adapters": True, "pooled": True}),
    ]),
    ids=str,
)  # fmt: skip
def test_texts_match_the_oracle(case, report, depth):
    stages, more = case
    steps = depth(1_500, 5_000, 250_000)
    counts = soak(
        7, steps, Parts(runner=HashPipeline, stages=stages, **more), world_steps=200
    )
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for name in ("preemptions", "cancelled", "prefix hit tokens", "masked requests"):
        assert counts[name] > 0, name


class OtherRow(StepTokens):
    """Returns a token to the slot of another row."""

    def last(self, row):
        return super().last((row + 1) % max(len(self.tokens), 1))


class NewestOnly(ReturnedTokens):
    """Returns the tokens of the step before, which may be of another lane."""

    def frame(self, message, head, limits):
        found = super().frame(message, head, limits)
        before = getattr(self, "before", None)
        self.before = self._steps.get(head.step)
        sources = [
            source if before is None else (before, min(source[1], 0))
            for source in found.sources
        ]
        return replace(found, sources=sources)


FOUND = WrongText, RunnerError, RequestError
"""The last one is of a grammar, which a wrong token may not follow."""


@pytest.mark.parametrize("fault", ["slot", "lane", "zero"])
def test_a_token_that_returns_wrongly_is_found(fault, monkeypatch):
    if fault == "slot":
        monkeypatch.setattr("inl.runners.returned_tokens.StepTokens", OtherRow)
    elif fault == "lane":
        monkeypatch.setattr("inl.runners.group_runner.ReturnedTokens", NewestOnly)
    else:
        monkeypatch.setattr(StepTokens, "last", lambda self, row: 0)
    with pytest.raises((*FOUND, AssertionError)):
        soak(7, 2_000, Parts(runner=HashPipeline, stages=2))


@pytest.mark.parametrize("kind", [STEP, ADMIT], ids=["step", "admission"])
def test_a_rank_that_skips_a_frame_is_found(kind, monkeypatch):
    skipped = iter(range(30))

    class Skipping(HashStage):
        def submit(self, message):
            if header(message).kind != kind or next(skipped, None) != 20:
                super().submit(message)

    monkeypatch.setattr("hash_stages.HashStage", Skipping)
    with pytest.raises(FOUND, match=r"rank 0 of 2|not \[|may not follow"):
        soak(7, 2_000, Parts(runner=HashPipeline, stages=2))


def test_a_stopped_stage_is_noticed_while_it_waits_for_tokens(monkeypatch):
    class Stopped(HashStage):
        def submit(self, message):
            """Nothing reads what is sent to a stopped process."""

        def collect(self):
            raise WorkerLost("was stopped by a signal")

    monkeypatch.setattr("hash_stages.HashStage", Stopped)
    core = EngineCore(HashPipeline(LIMITS))
    core.add(Request([1, 7], max_tokens=9))
    errors = []
    while core.has_work:
        errors += [event.error for event in core.step() if event.error]
    (error,) = errors
    assert type(error) is WorkerLost
    assert "rank 0 of 2 failed: WorkerLost: was stopped by a signal" in str(error)
    core.runner.close()


def served(count, limits=LIMITS, max_tokens=12, after=lambda core, steps: None):
    records = []
    runner = HashPipeline(limits)
    core = EngineCore(runner, on_step=records.append)
    requests = [Request([each, 7], max_tokens=max_tokens) for each in range(count)]
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
        after(core, len(records))
    runner.close()
    return requests, records


@pytest.mark.parametrize(("stages", "tokens"), [(2, 1250), (3, 1024)])
def test_a_long_prompt_is_computed_in_steps_that_overlap(stages, tokens):
    limits = replace(
        LIMITS, stages=stages, depth=stages + 1, token_budget=8192, block_size=16,
        blocks=(640,), max_blocks_per_seq=640, vocab=997,
    )  # fmt: skip
    request = Request(list(np.arange(10_000) % 997), max_tokens=2)
    records = []
    runner = HashPipeline(limits)
    policy = SchedulerConfig(token_budget=limits.token_budget)
    core = EngineCore(runner, policy, on_step=records.append)
    core.add(request)
    while core.has_work:
        core.step()
    runner.close()
    assert max(each.tokens for each in records) == tokens
    # With one stage, two steps of at most 8,192 tokens would be fewer.
    assert len(records) >= 8


@pytest.mark.parametrize(("count", "stages"), [(2, 2), (6, 2), (7, 3), (8, 4)])
def test_requests_divide_into_lanes(count, stages):
    limits = replace(LIMITS, stages=stages, depth=stages + 1)
    requests, records = served(count, limits)
    middle = records[stages + 2 : -2 * stages]
    share = -(-count // stages)
    assert middle
    assert all(each.rows <= share for each in middle)
    for at in range(len(middle) - stages + 1):
        lanes = [middle[at + lane].requests for lane in range(stages)]
        assert sum(map(len, lanes)) == len({*sum(lanes, ())})
    assert all(len(request.output_ids) == 12 for request in requests)


def test_one_request_runs_ahead_in_one_lane():
    _, records = served(1)
    assert len(records) == 12


def test_lanes_that_were_left_are_filled_again():
    def cancel(core, steps):
        if steps == 6:
            for number in [*core.live][1::2]:
                core.cancel(number)

    _, records = served(8, max_tokens=30, after=cancel)
    assert {len(each.requests) for each in records[12:-4]} <= {2}


def test_a_reset_ends_calls_that_wait_for_tokens():
    runner = HashPipeline(LIMITS)
    core = EngineCore(runner)
    requests = [Request([each, 7], max_tokens=9) for each in range(3)]
    for request in requests:
        core.add(request)
    core.step()
    core._is_unsettled = True  # as an interrupt leaves it, with steps in flight
    while core.has_work:
        assert not [event for event in core.step() if event.error]
    alone, _ = served(3, max_tokens=9)
    assert [r.output_ids for r in requests] == [r.output_ids for r in alone]
    runner.close()


def test_without_stages_nothing_is_divided():
    requests = [Request([1, 2], max_tokens=3) for _ in range(4)]
    assert in_lane(5, requests, 1) == requests
