"""Recurrent layers and activations, compared with the ops' bodies in float64."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import Op, f32, i32, instruction

from inl.ops import catalog
from inl.ops.activation import KINDS
from inl.ops.attention import random_step
from inl.ops.recurrent import LENGTH_EPS, Decay, Taps
from inl.ops.ssm import Ssm
from inl.spec.op import Case
from inl.spec.tolerance import judge

CATALOG = catalog()
SLOTS = 6


def step_of(rng, lengths=(3, 8, 0, 4), counts=(1, 1, 7, 3), padding=2):
    """Rows of (tokens before, tokens), the slots of which are not in order."""
    step, _ = random_step(rng, lengths, counts, pad_rows=padding, pad_tokens=padding)
    slots = np.concatenate([1 + rng.permutation(len(counts)), np.zeros(padding)])
    return step._replace(slots=i32(slots))


def conv_case(rng, step, channels, taps):
    return Case(
        f"{channels}x{taps}",
        (
            rng.standard_normal((step.tokens.size, channels)),
            rng.standard_normal((SLOTS, taps - 1, channels)),
            step,
            Taps(rng.standard_normal((channels, 1, taps))),
        ),
    )


def delta_case(rng, step, keys, heads, dim, width, *, tiled=False):
    tokens = step.tokens.size
    return Case(
        f"{keys}x{heads} of {dim}x{width}",
        (
            *rng.standard_normal((2, tokens, keys, dim)),
            rng.standard_normal((tokens, heads, width)),
            *rng.standard_normal((2, tokens, heads)),
            rng.standard_normal((SLOTS, heads, dim, width)),
            step,
            Decay(rng.standard_normal(heads), rng.standard_normal(heads)),
        ),
        {"tiled": tiled},
    )


def spans(step):
    return step.positions, step.starts, step.slots, step.used_counts


def conv(native, case):
    """The instruction, on float32; the table is that of the results."""
    x, table, step, w = case.args
    x, table, weight = f32(x), f32(table), f32(w.weight[:, 0].T)
    (tokens, channels), y = x.shape, np.full(x.shape, np.nan, np.float32)
    dims = tokens, step.slots.size, len(table), channels, len(weight), channels
    native.run(instruction(Op.CAUSAL_CONV, dims, (x, weight, table, y, *spans(step))))
    return y, table


def delta(native, case):
    q, k, v, a, b, table = map(f32, case.args[:6])
    step, w = case.args[6:]
    tokens, keys, dim = q.shape
    y = np.full(v.shape, np.nan, np.float32)
    heads, width = v.shape[1:]
    dims = (
        tokens, step.slots.size, len(table), keys, heads, dim, width, keys * dim,
        heads * width, case.attrs["tiled"],
    )  # fmt: skip
    decay = f32(w.rate), f32(w.shift)
    data = q, k, v, a, b, *decay, table, y, *spans(step)
    native.run(instruction(Op.DELTA_RULE, dims, data, (LENGTH_EPS,)))
    return y, table


def ssm_case(rng, step, groups, heads, dim, width):
    tokens = step.tokens.size
    rate, shift, skip = rng.standard_normal((3, heads))
    return Case(
        f"{groups}x{heads} of {dim}x{width}",
        (
            rng.standard_normal((tokens, heads, width)),
            *rng.standard_normal((2, tokens, groups, dim)),
            rng.standard_normal((tokens, heads)),
            rng.standard_normal((SLOTS, heads, dim, width)),
            step,
            Ssm(rate, shift, shift, skip),
        ),
    )


def ssm(native, case):
    x, b, c, dt, table = map(f32, case.args[:5])
    step, w = case.args[5:]
    (tokens, heads, width), (groups, dim) = x.shape, b.shape[1:]
    y = np.full(x.shape, np.nan, np.float32)
    dims = (
        tokens, step.slots.size, len(table), groups, heads, dim, width, heads * width,
        groups * dim, heads,
    )  # fmt: skip
    weights = f32(w.rate), f32(w.shift), f32(w.skip)
    data = x, b, c, dt, *weights, table, y, *spans(step)
    native.run(instruction(Op.SSM_SCAN, dims, data))
    return y, table


def judged(name, case, results):
    verdict = judge(CATALOG[name], case, "float32", results)
    assert verdict.passed, f"{name}/{case.name}: {verdict}"


@pytest.mark.parametrize(
    ("channels", "taps"), [(1, 2), (17, 3), (64, 4), (200, 4), (40, 9)]
)
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 1, 7, 3), (2, 70)])
def test_causal_conv(native, rng, channels, taps, counts):
    lengths = 3 * rng.permutation(len(counts))
    case = conv_case(rng, step_of(rng, lengths, counts), channels, taps)
    judged("causal_conv", case, conv(native, case))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 2, 3, 17), (2, 4, 24, 32), (2, 2, 16, 40),
              (1, 3, 128, 128), (1, 1, 40, 100)]
)  # fmt: skip
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 1, 7, 3), (2, 70)])
@pytest.mark.parametrize("tiled", [False, True])
def test_delta_rule(native, rng, shape, counts, tiled):
    lengths = 3 * rng.permutation(len(counts))
    case = delta_case(rng, step_of(rng, lengths, counts), *shape, tiled=tiled)
    judged("delta_rule", case, delta(native, case))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (1, 2, 3, 17), (2, 4, 24, 32), (1, 3, 128, 64),
              (2, 2, 40, 100)]
)  # fmt: skip
@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 1, 7, 3), (2, 70)])
def test_ssm_scan(native, rng, shape, counts):
    lengths = 3 * rng.permutation(len(counts))
    case = ssm_case(rng, step_of(rng, lengths, counts), *shape)
    judged("ssm_scan", case, ssm(native, case))


CONV = (conv, conv_case, (70, 4), 1)
DELTA = (delta, delta_case, (2, 4, 24, 40), 5)
SSM = (ssm, ssm_case, (2, 4, 24, 40), 4)
EACH = pytest.mark.parametrize(
    ("run", "make", "shape", "table"), [CONV, DELTA, SSM], ids=["conv", "delta", "ssm"]
)


def part(case, table, number, step, tokens):
    """The case with some of its tokens, another step and another table."""
    args = [each[tokens] if at < number else each for at, each in enumerate(case.args)]
    args[number : number + 2] = table, step
    return Case(case.name, tuple(args), case.attrs)


@EACH
def test_chunks_and_batches_change_no_bit(native, rng, run, make, shape, table):
    whole = make(rng, step_of(rng, [0], [12], padding=0), *shape)
    y, after = run(native, whole)
    state, found, start = whole.args[table], [], 0
    for count in (1, 1, 2, 5, 3):
        step = step_of(rng, [start], [count], padding=0)
        tokens = slice(start, start + count)
        one, state = run(native, part(whole, state, table, step, tokens))
        found.append(one)
        start += count
    assert np.array_equal(np.concatenate(found), y)
    assert np.array_equal(state, after)
    # The same tokens as the second row of a batch, in another slot.
    step = step_of(rng, [0, 0], [12, 12], padding=0)._replace(slots=i32([2, 1]))
    twice = np.concatenate([np.arange(12)[::-1], np.arange(12)])
    both, state = run(native, part(whole, whole.args[table], table, step, twice))
    assert np.array_equal(both[12:], y)
    assert np.array_equal(state[1], after[1])
    assert not np.array_equal(both[:12], y)


@EACH
def test_padding_gives_zeros_and_other_slots_stay(native, rng, run, make, shape, table):
    step = step_of(rng, [5, 0], [1, 3], padding=3)._replace(slots=i32([4, 2, 0, 0, 0]))
    case = make(rng, step, *shape)
    y, after = run(native, case)
    assert np.abs(y[:4]).max(axis=tuple(range(1, y.ndim))).all()
    if run is ssm:  # its body adds the skipped values to results of zero
        x, *_, w = case.args
        assert y[4:] == pytest.approx(x[4:] * w.skip[:, None], rel=1e-6)
    else:
        assert not y[4:].any()
    assert not after[0].any()
    before = f32(case.args[table])
    assert np.array_equal(after[[1, 3, 5]], before[[1, 3, 5]])
    assert not np.array_equal(after[4], before[4])


@EACH
def test_slots_and_spans_out_of_range_are_skipped(native, rng, run, make, shape, table):
    """Frames are checked before; a program must not write elsewhere all the same."""
    step = step_of(rng, [5, 5, 5], [1, 2, 1], padding=0)
    case = make(rng, step, *shape)
    bad = step._replace(slots=i32([-1, 3, SLOTS]), used_counts=i32([0, 9, 9]))
    y, after = run(native, part(case, case.args[table], table, bad, slice(None)))
    before = f32(case.args[table])
    assert np.array_equal(after[[1, 2, 4, 5]], before[[1, 2, 4, 5]])
    assert np.isfinite(y[1:3]).all()
    wild = step._replace(starts=i32([0, 1, 99, 7]))
    y, after = run(native, part(case, case.args[table], table, wild, slice(None)))
    changed = [n for n in range(1, SLOTS) if not np.array_equal(after[n], before[n])]
    assert changed == [step.slots[0]]


def test_extremes_are_finite(native, rng):
    """Decay of nothing and of all, strengths of 0 and 1, keys of length 0."""
    wide = step_of(rng, [0], [40], padding=0)
    args = list(delta_case(rng, wide, 1, 6, 24, 40).args)
    args[0][5], args[1][9], args[1][20] = 0, 0, 1e15
    args[3] = rng.choice([-3e38, -1e4, -20, 0, 20, 1e4, 3e38], args[3].shape)
    args[4] = rng.choice([-3e38, -90, 0, 90, 3e38], args[4].shape)
    args[7] = Decay(np.array([-200.0, -30, 0, 3, 80, 200]), np.zeros(6))
    y, table = delta(native, Case("extremes", tuple(args), {"tiled": False}))
    assert np.isfinite(y).all()
    assert np.isfinite(table).all()
    assert np.abs(y).max() > 0


def test_extremes_of_the_scan_are_finite(native, rng):
    args = list(ssm_case(rng, step_of(rng, [0], [40], padding=0), 2, 6, 24, 40).args)
    args[3] = rng.choice([-3e38, -1e4, -20, 0, 20, 1e4], args[3].shape)
    rate = np.array([-200.0, -30, 0, 3, 80, 200])
    args[6] = Ssm(rate, np.zeros(6), np.zeros(6), np.ones(6))
    y, table = ssm(native, Case("extremes", tuple(args)))
    assert np.isfinite(y).all()
    assert np.isfinite(table).all()
    assert np.abs(y).max() > 0


def test_decay_far_below_one_unit_is_not_lost(native, rng):
    """exp(-exp(rate) * softplus(a)) of a softplus below the resolution of 1."""
    case = delta_case(rng, step_of(rng, [0], [30], padding=0), 1, 2, 8, 16)
    a = np.full(case.args[3].shape, -18.0)
    decay = Decay(np.array([14.0, 16.0]), np.zeros(2))
    args = (*case.args[:3], a, *case.args[4:7], decay)
    sharp = Case("decay", args, case.attrs)
    judged("delta_rule", sharp, delta(native, sharp))


ACTIVATIONS = list(CATALOG["activate"].cases(np.random.default_rng(7)))


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case.name)
def test_activate(native, case):
    x = f32(case.args[0])
    y = np.empty_like(x)
    dims = x.size, KINDS.index(case.attrs["kind"])
    native.run(instruction(Op.ACTIVATE, dims, (x, y)))
    judged("activate", case, (y,))


@pytest.mark.parametrize("kind", KINDS)
def test_activations_keep_nan(native, kind):
    x = f32([np.nan, 1.0, -1.0])
    native.run(instruction(Op.ACTIVATE, (3, KINDS.index(kind)), (x, x)))
    assert np.array_equal(np.isnan(x), [True, False, False])
