"""Layers of Mamba-2 against their equations, token by token."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.models import mamba2
from inl.ops.attention import random_step
from inl.ops.linear import Linear
from inl.ops.norm import Norm
from inl.ops.recurrent import Taps
from inl.ops.ssm import Ssm
from inl.spec.cache import State
from inl.spec.dispatch import DynamicOps

SIZES = mamba2.Sizes(
    heads=4, head_dim=3, groups=2, state_dim=5, taps=3, conv_bias=True,
    activation="tanh",
)  # fmt: skip
HIDDEN, SLOTS = 7, 6
COUNTS = [4, 1, 6]
"""Tokens of each row; the rows continue texts of 3, 0 and 5 tokens."""


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.fixture
def rng():
    return np.random.default_rng(23)


def mixer(rng, scale):
    """Weights of a layer whose keys and queries are long if ``scale`` is large."""

    def draw(*shape):
        return rng.standard_normal(shape)

    shift, keys = draw(SIZES.heads), np.ones(SIZES.channels)
    keys[SIZES.inner :] = scale
    return mamba2.Mixer(
        Linear(draw(SIZES.rows, HIDDEN)),
        Taps(keys[:, None, None] * draw(SIZES.channels, 1, SIZES.taps)), scale=None,
        shift=Norm(draw(SIZES.channels)),
        scan=Ssm(draw(SIZES.heads) - 2, shift, shift, draw(SIZES.heads)),
        out=Linear(draw(HIDDEN, SIZES.inner)), norm=Norm(draw(SIZES.inner)),
        ones=Norm(np.ones(SIZES.inner // SIZES.groups)),
    )  # fmt: skip


def tables(rng):
    shapes = {item.name: item.shape for item in mamba2.state(SIZES, 0, "float64")}
    return {name: rng.standard_normal((SLOTS, *each)) for name, each in shapes.items()}


def expected(w, x, step, slotted, activation):
    """The equations of Mamba-2 (Dao and Gu, 2024) with a gated norm."""
    s, out = SIZES, np.zeros((x.shape[0], SIZES.inner))
    after = {name: table.copy() for name, table in slotted.items()}
    for row, slot in enumerate(step.slots):
        span = range(step.starts[row], step.starts[row + 1])
        fresh = step.positions[span[0]] == 0
        held = {name: 0 * t[slot] if fresh else t[slot] for name, t in slotted.items()}
        S = held["mamba.0.matrix"]
        for t in span:
            projected = w.project.weight @ x[t]
            gate, new, time = np.split(projected, [s.inner, s.inner + s.channels])
            seen = np.vstack([held["mamba.0.inputs"], new])
            total = np.einsum("kc,ck->c", seen, w.taps.weight[:, 0]) + w.shift.weight
            held["mamba.0.inputs"] = seen[1:]
            ends = [s.inner, s.inner + s.keys]
            values, *found = np.split(activation(total), ends)
            dt = np.log1p(np.exp(time + w.scan.shift))
            values = values.reshape(s.heads, s.head_dim)
            share = s.heads // s.groups
            B, C = (
                np.repeat(each.reshape(s.groups, -1), share, axis=0) for each in found
            )
            decay = np.exp(-np.exp(w.scan.rate) * dt)[:, None, None]
            S = decay * S + B[:, :, None] * (dt[:, None] * values)[:, None]
            y = np.einsum("hn,hnp->hp", C, S) + w.scan.skip[:, None] * values
            y = y.ravel() * silu(gate)
            grouped = y.reshape(s.groups, -1)
            grouped = grouped / np.sqrt(
                np.square(grouped).mean(-1, keepdims=True) + 0.1
            )
            out[t] = grouped.ravel() * w.norm.weight
        held["mamba.0.matrix"] = S
        for name, value in held.items():
            after[name][slot] = value
    return out, after


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_results_and_state_are_those_of_the_equations(rng, scale):
    """Keys of any length, rows that begin and rows that continue."""
    w, slotted = mixer(rng, scale), tables(rng)
    step, _ = random_step(rng, [3, 0, 5], COUNTS)
    step = step._replace(slots=np.array([4, 1, 5], np.int32))
    x = rng.standard_normal((sum(COUNTS), HIDDEN))
    linear = SIZES._replace(activation="relu")
    for sizes, activation in (
        (SIZES, np.tanh),
        (linear, lambda y: np.maximum(y, 0)),
    ):
        ops = DynamicOps(
            ReferenceBackend(Device("reference:0"), dtype="float64").kernels()
        )
        state = State((), {k: v.copy() for k, v in slotted.items()}, None)
        out, state = mamba2.mix(ops, sizes, w, x, step, state, 0, None, eps=0.1)
        want, after = expected(w, x, step, slotted, activation)
        assert np.abs(out - want).max() < 1e-11 * np.abs(want).max()
        for name, value in after.items():
            wide = np.abs(value[1:]).max()
            assert np.abs(state.slotted[name][1:] - value[1:]).max() < 1e-11 * wide


def test_rows_that_are_sampled_are_taken_after_the_state(rng):
    w, slotted = mixer(rng, 1.0), tables(rng)
    step, _ = random_step(rng, [3, 0, 5], COUNTS)
    step = step._replace(slots=np.array([4, 1, 5], np.int32))
    x = rng.standard_normal((sum(COUNTS), HIDDEN))
    ops = DynamicOps(ReferenceBackend(Device("reference:0"), dtype="float64").kernels())
    sampled = step._replace(samples=np.array([3, 4, 10], np.int32))
    found = []
    for pruned in (None, SimpleNamespace()):
        state = State((), {k: v.copy() for k, v in slotted.items()}, None)
        found.append(mamba2.mix(ops, SIZES, w, x, sampled, state, 0, pruned, eps=0.1))
    (every, one), (last, other) = found
    assert np.array_equal(every[[3, 4, 10]], last)
    for name in slotted:
        assert np.array_equal(one.slotted[name], other.slotted[name])
