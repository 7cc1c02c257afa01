from __future__ import annotations

import pytest

from inl.errors import RunnerError
from inl.scheduling.buckets import Buckets
from inl.spec.step import Bucket


def ladder(small, *buckets, budget=512, rows=4):
    return Buckets(small(buckets=buckets), token_budget=budget, max_rows=rows)


def test_without_programs_buckets_are_exact(small):
    buckets = ladder(small)
    assert (buckets.tokens, buckets.rows, buckets.sampler) == (
        512,
        4,
        "sample_filtered",
    )
    assert buckets.choose(17, 3, "sample") == Bucket(17, 3, 1, "sample")


def test_the_smallest_program_that_fits_is_chosen(small):
    buckets = ladder(small, Bucket(1, 1), Bucket(4, 4), Bucket(16, 4), Bucket(64, 4))
    assert (buckets.tokens, buckets.rows) == (64, 4)
    for tokens, rows, chosen in (
        (1, 1, 1),
        (2, 2, 4),
        (3, 3, 4),
        (3, 1, 16),
        (5, 1, 16),
        (64, 4, 64),
    ):
        assert buckets.choose(tokens, rows, "greedy").tokens == chosen


def test_rows_count_as_well_as_tokens(small):
    buckets = ladder(small, Bucket(8, 1), Bucket(8, 4))
    assert buckets.choose(2, 2, "greedy") == Bucket(8, 4)


def test_a_sampling_program_serves_greedy_steps_but_is_not_preferred(small):
    greedy, drawing = Bucket(8, 4), Bucket(8, 4, sampler="sample")
    assert ladder(small, drawing, greedy).choose(3, 1, "greedy") == greedy
    assert ladder(small, drawing).choose(3, 1, "greedy") == drawing
    assert ladder(small, greedy, drawing).choose(3, 1, "sample") == drawing
    assert ladder(small, greedy, drawing).sampler == "sample"
    assert ladder(small, greedy).sampler == "greedy"


def test_programs_of_samplers_that_are_not_served_are_unused(small):
    full, drawing = (
        Bucket(8, 4, sampler="sample_filtered"),
        Bucket(8, 4, sampler="sample"),
    )
    limits = small(buckets=(drawing, full), sampler="sample")
    buckets = Buckets(limits, token_budget=8, max_rows=4)
    assert buckets.sampler == "sample"
    assert buckets.choose(3, 1, "greedy") == drawing
    with pytest.raises(RunnerError, match=r"one token per row with sampler greedy$"):
        Buckets(small(buckets=(full,), sampler="greedy"), token_budget=8, max_rows=4)


def test_steps_fit_one_program_even_where_programs_are_not_nested(small):
    buckets = ladder(
        small, Bucket(4, 4, sampler="sample"), Bucket(16, 2, sampler="sample")
    )
    assert (buckets.tokens, buckets.rows) == (4, 4)


def test_no_more_rows_than_tokens(small):
    assert ladder(small, budget=3).rows == 3
    assert ladder(small, Bucket(2, 4, sampler="sample")).rows == 2


def test_a_runner_that_only_verifies_drafts_is_refused(small):
    with pytest.raises(
        RunnerError, match="found 4 tokens per row, needs one token per row"
    ):
        ladder(small, Bucket(8, 2, 4))
