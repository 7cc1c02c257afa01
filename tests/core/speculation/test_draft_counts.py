"""The number of drafts is the fastest one by the measured times, or none."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from inl.speculation.draft_counts import GAIN, StepTimes, choose_counts, never_falling


def speed(counts, rates, seconds):
    """Expected tokens per second of a step with these drafts."""
    tokens = sum(
        sum(rate**place for place in range(count + 1))
        for count, rate in zip(counts, rates, strict=True)
    )
    return tokens / seconds


@pytest.mark.parametrize("seed", range(40))
def test_the_fastest_counts_are_chosen(seed):
    random = Random(seed)
    rows = random.randint(1, 3)
    lengths = [random.randint(0, 3) for _ in range(rows)]
    rates = [random.uniform(0.05, 0.99) for _ in range(rows)]
    overhead = random.choice([0.0, 0.2])
    most = rows + sum(lengths)
    sizes = sorted({*random.sample(range(rows + 1, rows + 11), 3), max(most, rows + 1)})
    seconds, last = {}, 1.0
    for size in sizes:
        last *= random.uniform(1.0, 1.8)
        seconds[size] = last
    times = StepTimes(seconds, {rows: random.uniform(0.7, 1.0)})
    counts, padded, saved = choose_counts(
        lengths, rates, sizes, times, lambda _: overhead
    )

    none = speed([0] * rows, rates, times.plain[rows])
    best = max(
        (
            speed(each, rates, seconds[size] + overhead)
            for each in product(*(range(length + 1) for length in lengths))
            for size in sizes
            if 0 < sum(each) <= size - rows
        ),
        default=0.0,
    )
    if not any(counts):
        assert (padded, saved) == (rows, 0.0)
        assert best <= GAIN * none * (1 + 1e-9)
        return
    assert padded in sizes
    assert rows + sum(counts) <= padded
    assert all(0 <= n <= most for n, most in zip(counts, lengths, strict=True))
    found = speed(counts, rates, seconds[padded] + overhead)
    assert found == pytest.approx(best)
    assert found > GAIN * none
    assert saved == pytest.approx(1 / none - 1 / found)


def test_costs_in_proportion_to_tokens_draft_nothing():
    times = StepTimes({2: 2.0, 4: 4.0, 8: 8.0}, {1: 1.0})
    assert choose_counts([7], [0.99], [2, 4, 8], times) == ([0], 1, 0.0)


def test_without_times_every_draft_is_verified():
    assert choose_counts([2, 0, 1], [0.1] * 3, [4, 8], None)[:2] == ([2, 0, 1], 8)


def test_no_step_takes_longer_than_a_larger_one():
    measured = {1: 10.1, 4: 4.7, 2: 5.0, 8: 15.7, 16: 13.2, 32: 40.0}
    found = never_falling(measured)
    assert found == {1: 4.7, 2: 4.7, 4: 4.7, 8: 13.2, 16: 13.2, 32: 40.0}
    assert list(found) == sorted(measured)
    assert never_falling({}) == {}
