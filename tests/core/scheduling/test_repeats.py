"""When the scheduler repeats a step, and for how many tokens."""

from __future__ import annotations

import math

import pytest

from inl.config import EngineConfig
from inl.errors import RequestError
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.repeats import Repeats
from inl.scheduling.request import Request
from inl.scheduling.sampling_params import TokenLogprob
from inl.scheduling.scheduler import Scheduler
from inl.spec.step import Bucket
from toy_guide import ToyGrammar, ToyGuide

SCORED = TokenLogprob(7, -1.0, ())


@pytest.fixture
def scheduler(small):
    def make(steps=8, seconds=math.inf, blocks=99, **changes):
        limits = small(
            blocks=(blocks,), max_blocks_per_seq=16, decode_steps=steps, **changes
        )
        config = SchedulerConfig(
            decode_steps=steps, repeat_seconds=seconds, eos_ids=frozenset({5})
        )
        return Scheduler(limits, config)

    return make


def started(scheduler, *requests):
    """Add requests and collect their prompts."""
    for request in requests:
        scheduler.add(request)
    plan = scheduler.plan()
    scheduler.process_outputs([7] * len(plan.chunks), [SCORED] * len(plan.chunks))
    return requests


def spans(plan):
    return [(chunk.start, chunk.stop) for chunk in plan.chunks]


def test_rows_decode_several_tokens_at_known_positions(scheduler):
    made = scheduler()
    started(made, Request([1, 2], max_tokens=30), Request([3], max_tokens=6))
    plan = made.plan()
    assert spans(plan) == [(2, 10), (1, 6)]
    assert plan.bucket == Bucket(2, 2, repeat=8)
    assert plan.tokens == 13
    # The next step is planned before this one is collected.
    plan = made.plan()
    assert spans(plan) == [(10, 18)]
    made.process_several([[9] * 8, [9] * 5])
    assert [each.id for each in made.live.values()] == [1]


class Endless(ToyGrammar):
    def allowed(self, _output):
        return [7, 8]

    def is_complete(self, _output):
        return False


NOT_REPEATED = {
    "mask": {"allowed_token_ids": [1, 7]},
    "grammar": {"guide": ToyGuide(Endless(1, 97, set()))},
    "log-probabilities": {"logprobs": 1},
    "more stop ids than a row has": {"stop_ids": frozenset(range(20, 28))},
}


@pytest.mark.parametrize("fields", NOT_REPEATED.values(), ids=NOT_REPEATED)
def test_a_row_that_needs_the_host_is_not_repeated(scheduler, fields):
    made = scheduler()
    started(made, Request([1], max_tokens=30), Request([2], max_tokens=30, **fields))
    assert made.plan().bucket.repeat == 1
    made.process_outputs([7, 7], [SCORED] * 2)
    made.finish(made.live[2], "cancelled")
    assert made.plan().bucket.repeat == 8


def test_no_step_is_repeated_while_a_request_could_be_admitted(scheduler):
    made = scheduler(blocks=7)
    started(made, Request([1], max_tokens=60))
    assert made.plan().bucket.repeat == 8
    made.process_several([[9] * 8])
    # It waits for blocks.
    made.add(Request(range(20), max_tokens=3))
    plan = made.plan()
    assert (plan.bucket.repeat, len(plan.chunks)) == (1, 1)
    made.process_outputs([9])
    made.finish(made.live[2], "cancelled")
    assert made.plan().bucket.repeat == 8


def test_while_a_request_waits_for_a_row_a_step_ends_with_the_first_row(scheduler):
    made = scheduler(slots=3)
    started(made, Request([1], max_tokens=60), Request([2], max_tokens=6))
    made.add(Request([3], max_tokens=9))
    assert spans(made.plan()) == [(1, 6), (1, 6)]
    # The second ends with the step in flight: its row is not known to be free yet.
    assert spans(made.plan()) == [(6, 14)]
    made.process_several([[9] * 5, [9] * 5])
    assert [(c.start, c.stop) for c in made.plan().chunks] == [(14, 15), (0, 1)]


def test_blocks_are_reserved_only_from_free_ones_and_returned(scheduler):
    made = scheduler(blocks=7)
    first, second = started(
        made, Request([1] * 4, max_tokens=20), Request([2] * 4, max_tokens=20)
    )
    # Six blocks of four tokens: two for each sequence so far, two to share.
    plan = made.plan()
    assert spans(plan) == [(4, 12), (4, 12)]
    assert made.preemptions == 0
    plan = made.plan()
    # Nothing is free: the second is preempted for a single step of the first.
    assert [chunk.stop - chunk.start for chunk in plan.chunks] in ([], [4])
    made.process_several([[5], [9, 5]])
    for _ in range(2):
        if made.in_flight:
            made.process_several([[]] * len(made.in_flight[0].chunks))
    assert {first.finish_reason, second.finish_reason} == {"stop"}
    assert made.kv_cache.pools[0].used_blocks == 0


def test_a_step_is_expected_to_take_at_most_the_limit():
    now = [0.0]
    config = SchedulerConfig(decode_steps=16, repeat_seconds=0.1)
    repeats = Repeats(config, clock=lambda: now[0])

    class Plan:
        chunks, decode_rows, is_repeated = [None], 1, False

    def after(seconds, steps=1, *, is_first=True):
        repeats.planned(is_first=is_first)
        now[0] += seconds
        repeats.collected(Plan, steps)
        return repeats.steps

    assert repeats.steps == 1  # nothing is measured
    assert after(3.0) == 1  # it was compiled
    assert after(0.021) == 4
    assert after(0.076, 4) == 5
    assert after(0.004) == 16
    # With a step in flight, from the end of the one before.
    repeats.planned(is_first=True)
    assert after(0.05, 5, is_first=False) == 16
    for _ in range(60):
        steps = after(0.24, 12)
    assert steps == 5
    Plan.decode_rows = 0
    assert after(0.001) == 5  # prompts say nothing about decoding


def test_one_step_is_the_default_and_needs_no_clock(small):
    def clock():
        raise AssertionError("is not needed")

    repeats = Repeats(SchedulerConfig(), clock)
    repeats.planned(is_first=True)
    repeats.collected(None)
    assert repeats.steps == 1
    made = Scheduler(small(), SchedulerConfig())
    started(made, Request([1], max_tokens=9))
    assert made.plan().bucket == Bucket(1, 1)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"decode_steps": 0}, "None or a whole number of 1 or more"),
        ({"decode_steps": 65}, "None or 1 to 64"),
        ({"decode_steps": 2, "use_kv_cache": False}, "None or 1 with speculation or"),
        ({"decode_steps": 2, "speculation": "ngram"}, "None or 1 with speculation or"),
    ],
)
def test_a_config_that_cannot_repeat_is_refused(fields, accepted):
    with pytest.raises(RequestError, match=f"decode_steps: found .*{accepted}"):
        EngineConfig(**fields)


def test_the_backend_chooses_unless_something_excludes_repetition():
    assert EngineConfig().repeated_steps(8) == 8
    assert EngineConfig(decode_steps=3).repeated_steps(8) == 3
    assert EngineConfig(speculation="ngram").repeated_steps(8) == 1
    assert EngineConfig(max_drafts=4).repeated_steps(8) == 1  # of a worker
    assert EngineConfig(use_kv_cache=False).repeated_steps(8) == 1
