"""Sampling returns exactly the tokens of the op's body."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import Flag, Op, f32, i32, instruction

from inl.ops import catalog
from inl.ops.sample import allowed_tokens as allowed_by_sorting
from inl.spec.step import NEUTRAL
from inl.spec.tolerance import judge

SAMPLE = catalog()["sample"]
CASES = list(SAMPLE.cases(np.random.default_rng(11)))
FLAGS = {
    "greedy": Flag.SAMPLE_GREEDY,
    "sample": Flag.SAMPLE_RANDOM,
    "sample_filtered": Flag.SAMPLE_FILTERED,
}


def sample(native, logits, step, tables, sampler):
    """Tokens and tables, as the op returns them."""
    samples, vocabulary = logits.shape
    rows, logits = len(step.slots), f32(logits).copy()
    tables = type(tables)(*(array.copy() for array in tables))
    tokens = np.full(samples, -1, np.int32)
    program = []
    if sampler == "sample_filtered":
        fed = i32(step.tokens[np.minimum(step.starts[:-1], len(step.tokens) - 1)])
        dims = rows, vocabulary, vocabulary, int(step.used_counts[0])
        data = logits, step.slots, tables.params, tables.token_counts, tables.bias, fed
        program.append(instruction(Op.PENALIZE, dims, data))
    dims = samples, vocabulary, vocabulary, samples // rows
    data = logits, tokens, step.slots, tables.last, tables.params, step.uniforms
    program.append(instruction(Op.SAMPLE, dims, data, flags=FLAGS[sampler]))
    native.run(*program)
    return tokens, tables


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sample(native, case):
    logits, step, tables = case.args
    found = sample(native, logits, step, tables, case.attrs["sampler"])
    verdict = judge(SAMPLE, case, "float32", found)
    assert verdict.passed, verdict


def uniform_step(rng, vocabulary, **parameters):
    """A step of four rows with one sample each and the given parameters."""
    case = next(case for case in CASES if case.name == "sample_filtered/257")
    _, step, tables = case.args
    params = tables.params.copy()
    params[1:] = NEUTRAL
    for column, value in parameters.items():
        params[1:, int(column[1:])] = value
    tables = tables._replace(
        params=params,
        token_counts=np.zeros((4, vocabulary), np.int32),
        bias=np.zeros((4, vocabulary), np.float32),
    )
    uniforms = f32(rng.uniform(0, 1, 4)).view(np.int32)
    return step._replace(uniforms=uniforms), tables


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 17, 8192, 8193, 49152])
def test_greedy_over_segments(native, rng, vocabulary):
    step, tables = uniform_step(rng, vocabulary)
    logits = f32(rng.standard_normal((4, vocabulary)))
    # A tie between two segments goes to the lower id.
    logits[0, [vocabulary // 3, vocabulary - 1]] = 9
    tokens, _ = sample(native, logits, step, tables, "greedy")
    assert np.array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("number", [99, 173, 263, 767])
def test_the_highest_uniform_gives_a_possible_token(native, number):
    """For these seeds, vector sums exceed the scalar sum."""
    rng = np.random.default_rng(number)
    step, tables = uniform_step(rng, 400, p0=1.0)
    highest = np.full(4, 1 - 2**-24, np.float32)
    step = step._replace(uniforms=highest.view(np.int32))
    logits = f32(6 * rng.standard_normal((4, 400)))
    logits[:, 300:] = -1e30
    tokens, _ = sample(native, logits, step, tables, "sample")
    assert (tokens < 300).all()


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize(
    "filters", [{"p1": 40.0}, {"p2": 0.8}, {"p3": 0.05}, {"p1": 900.0, "p2": 0.5}, {}]
)
def test_filters_of_a_large_vocabulary(native, rng, spread, filters):
    """Filters by histogram equal filters by sorting, with many ties."""
    vocabulary = 5000
    for _ in range(5):
        step, tables = uniform_step(rng, vocabulary, p0=1.0, **filters)
        logits = f32(np.round(spread * rng.standard_normal((4, vocabulary)), 1))
        found, _ = sample(native, logits, step, tables, "sample_filtered")
        args = logits.astype(np.float64), step, tables
        wanted, _ = SAMPLE.body(*args, sampler="sample_filtered")
        assert np.array_equal(found, wanted)


def test_filtered_tokens_are_never_sampled(native, rng):
    step, tables = uniform_step(rng, 300, p0=1.0, p1=7.0)
    logits = f32(rng.standard_normal((4, 300)))
    scaled = logits - logits.max(-1, keepdims=True)
    params = np.repeat(tables.params[1:2], 4, 0)[:, :, None]
    allowed = allowed_by_sorting(scaled.astype(np.float64), params)
    assert allowed.sum(-1).tolist() == [7] * 4
    seen = set()
    for uniform in np.linspace(0, 0.9999, 60, dtype=np.float32):
        step = step._replace(uniforms=np.full(4, uniform, np.float32).view(np.int32))
        tokens, _ = sample(native, logits, step, tables, "sample_filtered")
        slots = step.slots > 0
        assert allowed[np.arange(4), tokens][slots].all()
        seen.update(zip(np.flatnonzero(slots), tokens[slots], strict=True))
    assert len(seen) > 12


def test_neutral_filters_change_nothing(native, rng):
    step, tables = uniform_step(rng, 1000, p0=0.9)
    logits = f32(rng.standard_normal((4, 1000)))
    filtered, _ = sample(native, logits, step, tables, "sample_filtered")
    unfiltered, _ = sample(native, logits, step, tables, "sample")
    assert np.array_equal(filtered, unfiltered)


INVALID = {
    "all NaN": (slice(None), np.nan),
    "all -inf": (slice(None), -np.inf),
    "all inf": (slice(None), np.inf),
    "first NaN": (0, np.nan),
    "last NaN": (-1, np.nan),
    "negative NaN": (3, -np.float32(np.nan)),
    "inf": (7, np.inf),
    "last inf": (-1, np.inf),
}


@pytest.mark.parametrize("vocabulary", [1, 15, 33, 8193, 20000])
@pytest.mark.parametrize("sampler", FLAGS)
def test_rows_with_invalid_logits_have_no_token(native, rng, sampler, vocabulary):
    """Other rows are not affected, and the slot's last token stays in range."""
    step, tables = uniform_step(rng, vocabulary, p0=1.0, p1=3.0, p2=0.5, p4=1.1)
    valid = f32(rng.standard_normal((4, vocabulary)))
    expected, after = sample(native, valid, step, tables, sampler)
    assert (expected >= 0).all()
    row = int(np.flatnonzero(step.slots)[0])
    others = np.arange(4) != row
    for name, (where, value) in INVALID.items():
        logits = valid.copy()
        logits[row, where if isinstance(where, slice) else where % vocabulary] = value
        tokens, found = sample(native, logits, step, tables, sampler)
        assert tokens[row] == -1, name
        assert found.last[step.slots[row]] == 0, name
        assert np.array_equal(tokens[others], expected[others]), name
        slots = step.slots[others]
        assert np.array_equal(found.last[slots], after.last[slots]), name


@pytest.mark.parametrize("at", range(0, 96, 5))
def test_a_nan_is_found_in_every_lane(native, rng, at):
    """Maximum instructions return either operand if one of them is NaN."""
    step, tables = uniform_step(rng, 96)
    logits = f32(np.sort(rng.standard_normal((4, 96)))[:, ::-1])
    logits[1, at] = np.nan
    tokens, _ = sample(native, logits, step, tables, "greedy")
    assert tokens.tolist() == [0, -1, 0, 0]


@pytest.mark.parametrize("sampler", FLAGS)
def test_single_infinite_penalties_and_masked_logits_are_valid(native, rng, sampler):
    """-inf and -1e30 exclude tokens, and penalties may overflow."""
    step, tables = uniform_step(rng, 40, p0=1.0, p4=0.01)
    tables.token_counts[:, 20:] = 1
    logits = f32(rng.standard_normal((4, 40)))
    logits[:, :9], logits[:, 9:18] = -np.inf, -1e30
    logits[:, 39] = 3e38
    tokens, _ = sample(native, logits, step, tables, sampler)
    assert (tokens == 39).all()
