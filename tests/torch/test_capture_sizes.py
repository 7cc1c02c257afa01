"""Step sizes for which GPU backends capture graphs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inl.scheduling.buckets import Buckets
from inl.spec.limits import Limits
from inl.spec.step import SAMPLERS, Bucket
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


def test_the_costliest_sampler_leaves_the_coarsest_sizes():
    found = [
        b
        for b in capture_sizes(limits(8, "sample_filtered"))
        if b.sampler == "sample_filtered"
    ]
    assert sizes(found) == [
        (1, 1), (2, 2), (4, 4), (8, 8), (64, 8), (512, 8), (2048, 8), (8192, 8),
    ]  # fmt: skip


def test_one_long_prompt_has_separate_buckets():
    found = sizes(capture_sizes(limits(8, "greedy", width=504)))
    assert found[-3:] == [(2048, 1), (4096, 1), (8064, 1)]


def test_decode_sizes_end_with_all_rows():
    assert decode_sizes(1, 2) == [1]
    assert decode_sizes(9, 2) == [1, 2, 4, 8, 9]
    assert decode_sizes(512, 4) == [1, 4, 16, 64, 256, 512]


@given(st.integers(1, 5000), st.sampled_from(SAMPLERS), st.integers(1, 600))
def test_any_planned_step_has_a_bucket(rows, sampler, width):
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
    for name in given_limits.samplers:
        best = planned.choose(planned.tokens, planned.rows, name)
        assert isinstance(best, Bucket)
        assert planned.choose(1, 1, name).tokens == 1


def _fields(value):
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
