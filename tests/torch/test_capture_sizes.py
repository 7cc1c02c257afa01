"""Step sizes for which GPU backends capture graphs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from inl.scheduling.buckets import Buckets
from inl.spec.limits import Limits
from inl.spec.step import SAMPLERS
from inl_torch.gpu.capture_sizes import MAX_GRAPHS, capture_sizes, decode_sizes


def limits(rows, sampler, width=64):
    return Limits(rows + 1, (rows * width + 1,), 16, width, 97, sampler=sampler)


def sizes(found):
    return [(bucket.tokens, bucket.rows) for bucket in found]


def test_a_small_batch():
    assert sizes(capture_sizes(limits(8, "greedy"))) == [
        (1, 1), (2, 2), (4, 4), (8, 8), (64, 8), (128, 8), (256, 8), (512, 8),
        (768, 8), (1024, 8), (1536, 8), (2048, 8), (3072, 8), (4096, 8), (6144, 8),
        (8192, 8),
    ]  # fmt: skip


def of_sampler(found, name):
    return sizes(bucket for bucket in found if bucket.sampler == name)


def test_every_sampler_has_the_same_decoding_sizes():
    found = capture_sizes(limits(512, "sample_filtered", width=2500))
    decodes = [(1 << power, 1 << power) for power in range(10)]
    for name in SAMPLERS:
        assert of_sampler(found, name)[:10] == decodes
    assert of_sampler(found, "greedy") == of_sampler(found, "sample_filtered")
    assert of_sampler(found, "sample") == decodes


def test_one_long_prompt_has_separate_buckets():
    found = sizes(capture_sizes(limits(8, "greedy", width=504)))
    assert found[-3:] == [(2048, 1), (4096, 1), (8064, 1)]


def test_larger_token_budgets_have_larger_steps():
    """Without them steps end at 8,192 tokens, which the scheduler keeps to."""
    given_limits = limits(8, "greedy", width=2500)
    assert max(sizes(capture_sizes(given_limits))) == (8192, 8)
    more = replace(given_limits, token_budget=20_000)
    found = capture_sizes(more)
    assert {(8192, 8), (20_000, 8), (8192, 1), (20_000, 1)} <= {*sizes(found)}
    assert max(sizes(found)) == (20_000, 8)
    planned = Buckets(replace(more, buckets=found), token_budget=20_000, max_rows=8)
    assert planned.tokens == 20_000
    assert planned.choose(17_000, 1, "greedy").tokens == 20_000
    many = limits(1024, "sample_filtered", width=2500)
    assert len(capture_sizes(replace(many, token_budget=1 << 17))) <= MAX_GRAPHS


def test_decode_sizes_end_with_all_rows():
    assert decode_sizes(1) == [1]
    assert decode_sizes(9) == [1, 2, 4, 8, 9]
    assert decode_sizes(512) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


@given(st.data(), st.integers(1, 5000), st.sampled_from(SAMPLERS), st.integers(1, 600))
def test_any_planned_step_has_a_bucket(data, rows, sampler, width):
    given_limits = limits(rows, sampler, width)
    found = capture_sizes(given_limits)
    assert len(set(found)) == len(found) <= MAX_GRAPHS
    assert {bucket.sampler for bucket in found} == set(given_limits.samplers)
    planned = Buckets(
        Limits(**{**_fields(given_limits), "buckets": found}),
        token_budget=512,
        max_rows=rows,
    )
    assert planned.rows == min(rows, planned.tokens)
    count = data.draw(st.integers(1, planned.rows))
    tokens = data.draw(st.integers(count, planned.tokens))
    for name in given_limits.samplers:
        assert planned.choose(1, 1, name).tokens == 1
        planned.choose(planned.tokens, planned.rows, name)
        chosen = planned.choose(tokens, count, name)
        assert chosen.tokens >= tokens
        assert chosen.rows >= count
        # Decoding steps compute at most twice their rows, and prompts are never
        # computed by a program of one token per row.
        if tokens == count:
            assert chosen.tokens < 2 * tokens
        elif planned.tokens > planned.rows:
            assert chosen.tokens > chosen.rows


def _fields(value):
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


@given(st.integers(1, 300), st.sampled_from(SAMPLERS), st.integers(1, 20))
def test_drafts_of_any_rows_can_be_verified(rows, sampler, drafts):
    given = replace(limits(rows, sampler), max_drafts=drafts)
    buckets = Buckets(
        replace(given, buckets=capture_sizes(given)), token_budget=8192, max_rows=rows
    )
    assert buckets.can_verify(drafts + 1)
    for count in (1, rows):
        sizes = buckets.verifier_sizes(count, drafts + 1, sampler)
        assert sizes[-1] >= min(count * (drafts + 1), rows * 2)
        bucket = buckets.choose_verifier(sizes[-1], count, drafts + 1, sampler)
        assert bucket.verifies
        assert bucket.rows >= count


@given(st.data(), st.integers(1, 600), st.sampled_from(SAMPLERS), st.integers(1, 15))
def test_any_drafts_have_a_bucket(data, rows, sampler, drafts):
    given_limits = replace(limits(rows, sampler), max_drafts=drafts)
    found = capture_sizes(given_limits)
    planned = Buckets(
        Limits(**{**_fields(given_limits), "buckets": found}),
        token_budget=8192,
        max_rows=rows,
    )
    width = drafts + 1
    assert planned.can_verify(width)
    count = data.draw(st.integers(1, planned.rows))
    for name in given_limits.samplers:
        sizes = planned.verifier_sizes(count, width, name)
        # One draft for each row is never padded to more than twice the rows.
        assert sizes[0] <= 4 * count
        assert sizes[-1] >= 2 * count
        chosen = planned.choose_verifier(sizes[0], count, width, name)
        assert chosen.verifies
        assert chosen.rows >= count
