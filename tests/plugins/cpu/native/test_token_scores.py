"""Scores of tokens are those of the op's body in float64, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import Op, f32, i32, instruction

from inl.ops import catalog
from inl.spec.op import Case
from inl.spec.step import TOP
from inl.spec.tolerance import judge

SCORE = catalog()["score"]
CASES = list(SCORE.cases(np.random.default_rng(3)))


def score(native, logits, tokens, count=TOP, padding=0):
    """Chosen, ids and values, with numbers between the rows that are never read."""
    rows, vocabulary = logits.shape
    spread = np.full((rows, vocabulary + padding), np.nan, np.float32)
    spread[:, :vocabulary] = logits
    chosen = np.full(rows, 7, np.float32)
    ids = np.full((rows, count), -7, np.int32)
    values = np.full((rows, count), 7, np.float32)
    dims = rows, vocabulary, vocabulary + padding, count
    native.run(instruction(Op.SCORE, dims, (spread, i32(tokens), chosen, ids, values)))
    return chosen, ids, values


def check(native, logits, tokens, padding=0):
    case = Case("", (f32(logits).astype(np.float64), i32(tokens)))
    count = min(TOP, logits.shape[1])
    found = score(native, f32(logits), tokens, count, padding)
    verdict = judge(SCORE, case, "float32", found)
    assert verdict.passed, verdict
    wanted = np.argsort(-f32(logits), axis=-1, kind="stable")[:, :count]
    assert np.array_equal(found[1], wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_of_the_op(native, case):
    check(native, *case.args)


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 63, 64, 65, 2048, 2049, 49152])
def test_vocabularies_around_the_sizes_of_parts(native, rng, vocabulary):
    logits = 4 * rng.standard_normal((5, vocabulary))
    check(native, logits, rng.integers(0, vocabulary, 5), padding=3)


@pytest.mark.parametrize("decimals", [0, 1, 8])
def test_ties_are_in_the_order_of_ids(native, rng, decimals):
    logits = np.round(rng.standard_normal((4, 5000)), decimals)
    check(native, logits, rng.integers(0, 5000, 4))


def test_sorted_rows_and_rows_whose_largest_logit_comes_last(native, rng):
    rows = np.sort(rng.standard_normal((4, 9000)))
    rows[1] = rows[1, ::-1]
    rows[2, -1], rows[3, 0] = 60.0, 60.0
    check(native, rows, [0, 1, 8999, 0])


@pytest.mark.parametrize("shift", [-3e4, 3e4, 1e30])
def test_large_logits_do_not_overflow(native, rng, shift):
    check(native, rng.standard_normal((2, 3000)) + shift, [5, 2999])


def test_excluded_tokens_have_no_probability(native, rng):
    logits = f32(rng.standard_normal((2, 3000)))
    logits[:, :2100] = -np.inf
    logits[1, 2110:] = -np.inf
    chosen, ids, values = score(native, logits, [5, 2105])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    assert chosen[0] == -np.inf
    assert chosen[1] == pytest.approx(exact[1, 2105], rel=1e-6)
    assert np.array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :TOP])
    assert values[1, 10:].tolist() == [-np.inf] * 10
    assert np.isfinite(values[0]).all()


INVALID = {"NaN": np.nan, "-NaN": -np.float32(np.nan), "inf": np.inf}


@pytest.mark.parametrize("value", INVALID.values(), ids=INVALID)
@pytest.mark.parametrize("at", [0, 17, 2047, 2048, 4999])
def test_rows_with_invalid_logits_have_nan_and_ids_that_exist(native, rng, value, at):
    """Other rows are not affected."""
    logits = f32(rng.standard_normal((3, 5000)))
    before = score(native, logits, [1, 2, 3])
    logits[1, at] = value
    after = score(native, logits, [1, 2, 3])
    for one, other in zip(before, after, strict=True):
        assert np.array_equal(one[[0, 2]], other[[0, 2]])
    assert np.isnan(after[0][1])
    assert np.isnan(after[2][1]).all()
    assert ((after[1] >= 0) & (after[1] < 5000)).all()


def test_a_row_without_any_token_and_tokens_that_do_not_exist_have_nan(native, rng):
    logits = f32(rng.standard_normal((4, 40)))
    logits[0] = -np.inf
    chosen, ids, values = score(native, logits, [3, -1, 40, 39])
    assert np.isnan(chosen).tolist() == [True, True, True, False]
    assert np.isnan(values).any(-1).tolist() == [True, False, False, False]
    assert ((ids >= 0) & (ids < 40)).all()
