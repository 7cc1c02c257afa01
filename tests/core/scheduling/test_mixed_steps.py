"""Steps with prompts beside decoding sequences: how many tokens, and whose prompts."""

from __future__ import annotations

import numpy as np
import pytest

from inl import EngineConfig
from inl.errors import RequestError
from inl.scheduling.buckets import Buckets
from inl.scheduling.mixed_steps import LEAST_TOKENS, MixedSteps
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.step import Bucket

SIZES = (512, 1024, 2048, 4096, 8192)


def ladder(*sizes, rows=8):
    return tuple(Bucket(tokens=size, rows=rows) for size in sizes)


def scheduler(small, *, budget=8192, sizes=(), seconds=None, **config):
    """A scheduler; with ``seconds``, each token of a step takes as many."""
    limits = small(
        slots=9, blocks=(1 << 15,), max_blocks_per_seq=1 << 13, buckets=ladder(*sizes)
    )
    made = Scheduler(limits, SchedulerConfig(token_budget=budget, **config))
    if seconds is not None:
        clock = Clock(seconds)
        made.mixed = MixedSteps(made.config, clock)
        made.clock = clock
    return made


class Clock:
    def __init__(self, seconds):
        self.seconds, self.now = seconds, 0.0

    def __call__(self):
        return self.now


def turn(made):
    """Compute a step; returns tokens of each of its rows by request."""
    plan = made.plan()
    if hasattr(made, "clock"):
        made.clock.now += made.clock.seconds * plan.tokens
    made.process_outputs([7] * len(plan.chunks))
    return {chunk.request.id: chunk.stop - chunk.start for chunk in plan.chunks}


def decoding(made, count=1):
    for _ in range(count):
        made.add(Request([1], max_tokens=4000, ignore_eos=True))
    assert turn(made) == dict.fromkeys(range(1, count + 1), 1)


def test_a_step_is_whole_while_nothing_decodes(small):
    made = scheduler(small)
    made.add(Request([7] * 9000, max_tokens=2))
    assert turn(made) == {1: 8192}


def test_a_step_beside_decoding_rows_has_a_quarter_of_the_budget(small):
    made = scheduler(small)
    decoding(made, 2)
    made.add(Request([7] * 9000, max_tokens=2))
    assert turn(made) == {1: 1, 2: 1, 3: 2046}


def test_a_step_has_a_part_of_the_prompts_that_wait(small):
    made = scheduler(small)
    decoding(made)
    for _ in range(8):
        made.add(Request([7] * 8000, max_tokens=2))
    assert sum(turn(made).values()) == 8 * 8000 // 8


def test_small_budgets_are_not_divided(small):
    made = scheduler(small, budget=600)
    decoding(made)
    made.add(Request([7] * 9000, max_tokens=2))
    assert turn(made) == {1: 1, 2: 599}


def test_without_a_cache_a_sequence_is_whole(small):
    made = scheduler(small, use_kv_cache=False)
    decoding(made)
    made.add(Request([7] * 4000, max_tokens=2))
    assert turn(made) == {1: 2, 2: 4000}


@pytest.mark.parametrize("milliseconds", [20, 50])
def test_steps_take_the_milliseconds_that_are_asked_for(small, milliseconds):
    made = scheduler(small, seconds=3e-5, inter_token_ms=milliseconds)
    decoding(made)
    made.add(Request([7] * 16_000, max_tokens=2))
    found = [sum(turn(made).values()) for _ in range(6)]
    # The first is not measured yet.
    assert found[0] == 2048
    assert found[1:] == [pytest.approx(milliseconds / 3e-2, abs=1)] * 5


def test_slow_steps_have_some_tokens_of_prompts(small):
    made = scheduler(small, seconds=1.0, inter_token_ms=1)
    decoding(made)
    made.add(Request([7] * 9000, max_tokens=2))
    turn(made)
    assert turn(made) == {1: 1, 2: LEAST_TOKENS}


def test_a_bound_is_a_positive_number():
    for value in (0, -1, True, "50"):
        with pytest.raises(RequestError, match=r"inter_token_ms: found"):
            EngineConfig(inter_token_ms=value)


def test_short_prompts_overtake_the_rest_of_a_long_one(small):
    made = scheduler(small, budget=512, prefix_cache=False)
    made.add(Request([7] * 3000, max_tokens=2))
    assert turn(made) == {1: 512}
    for length in (100, 200, 300):
        made.add(Request([7] * length, max_tokens=2))
    # One for each 1,024 tokens of the long one, in order of arrival.
    assert turn(made) == {2: 100, 3: 200, 1: 212}
    assert turn(made) == {2: 1, 3: 1, 1: 510}


def test_equal_prompts_stay_in_order(small):
    made = scheduler(small, budget=512, prefix_cache=False)
    for _ in range(4):
        made.add(Request([7] * 3000, max_tokens=1))
    order = [min(turn(made)) for _ in range(4 * 3000 // 512)]
    assert order == sorted(order)


def test_a_long_prompt_waits_for_a_bounded_number_of_others(small):
    made = scheduler(small, budget=512, prefix_cache=False)
    long = Request([7] * 5000, max_tokens=1)
    made.add(long)
    steps = 0
    while long.finish_reason is None:
        made.add(Request([7] * 500, max_tokens=1))
        turn(made)
        steps += 1
    # Ten steps of its own, and one for each of the four that overtake it.
    assert steps <= 15


@pytest.mark.parametrize(
    ("tokens", "most", "computed"),
    [
        (5000, 8192, 4096),  # 4096 and 1024 instead of 8192
        (7000, 8192, 8192),  # 4096 and 4096 are no fewer
        (4096, 8192, 8192),  # fills a program
        (4100, 8192, 4096),
        (600, 8192, 8192),
        (900, 8192, 8192),
        (100, 8192, 8192),
        (20_000, 8192, 8192),
        (20_000, 3000, 2048),  # the rest is computed with what follows
        (20_000, 2040, 2040),
    ],
)
def test_steps_fill_programs(small, tokens, most, computed):
    buckets = Buckets(small(buckets=ladder(*SIZES)), token_budget=8192, max_rows=8)
    assert buckets.fill(tokens, 0, most) == computed


def test_without_programs_steps_have_any_size(small):
    buckets = Buckets(small(), token_budget=8192, max_rows=8)
    assert buckets.fill(5000, 3, 8192) == 8192
    assert buckets.fill(5000, 3, 2048) == 2048


@pytest.mark.parametrize("seed", range(6))
def test_every_prompt_is_computed_once(small, seed):
    rng = np.random.default_rng(seed)
    made = scheduler(small, sizes=SIZES, prefix_cache=False)
    if rows := seed % 4:
        decoding(made, rows)
    lengths = rng.integers(1, 9000, 12).tolist()
    prompts = {made.add(Request([7] * each, max_tokens=1)): each for each in lengths}
    computed = dict.fromkeys(prompts, 0)
    while any(number in made.live for number in prompts):
        for number, tokens in turn(made).items():
            if number in prompts:
                computed[number] += tokens
    assert computed == prompts
