"""Recorded programs give the same results as their ops run immediately."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from inl.dtypes import wrap
from inl.errors import KernelFailed
from inl.models.llama import MODEL
from inl.ops.norm import Norm
from inl.spec.dispatch import DynamicOps
from inl.spec.limits import Limits
from inl.spec.message import HEADER_WORD, STEP, Row, admit_frame, step_frame
from inl.spec.step import Bucket
from inl.testing.tiny import MemoryCheckpoint, local_runner, tiny_llama
from inl_cpu.encoding import Instruction
from inl_cpu.instructions import RmsNorm
from inl_cpu.kernels.dense import pack_linear, pack_mlp, pack_qkv
from inl_cpu.program import Program, RecordedProgram

HIDDEN = 32


def recorded(backend, function):
    """``function(ops, x)`` as a program of (weights, message, state), and its steps."""
    ops = DynamicOps(tuple(backend.kernels()))

    def run(_weights, message, state):
        return function(ops, message), state

    recordings = backend.programs
    program = Program(run, backend.emitter, recordings)
    return program, lambda: next(reversed(recordings.values())).steps


def both(backend, function, *inputs):
    """Compare immediate and recorded runs on each input; counts the recorded steps."""
    ops = DynamicOps(tuple(backend.kernels()))
    program, items = recorded(backend, function)
    for x in inputs:
        want = function(ops, x.copy())
        found, _ = program(None, x, ())
        for got, exact in zip(flat(found), flat(want), strict=True):
            np.testing.assert_allclose(got, exact, rtol=2e-6, atol=2e-6)
    return Counter(
        item.spec().name if isinstance(item, Instruction) else "python"
        for item in items()
    )


def flat(tree):
    return tree if isinstance(tree, (tuple, list)) else (tree,)


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def linear(backend, rng, rows=24, columns=HIDDEN):
    group = {"weight": wrap(floats(rng, rows, columns)), "bias": None}
    return pack_linear(backend.emitter, group, backend, "float32")


def inputs(rng, rows=5):
    return [floats(rng, rows, HIDDEN) for _ in range(3)]


def test_sums_and_products_are_native(backend, rng):
    def function(_ops, x):
        return (x + x * x - x) * 3.0 + 0.5, 1.0 - x

    found = both(backend, function, *inputs(rng))
    assert found == {"add": 1, "mul": 1, "sub": 1, "scale": 3}


def test_broadcasting_is_a_python_step(backend, rng):
    found = both(backend, lambda _ops, x: x * x[:1] + x[:, :1], *inputs(rng))
    assert found == {"python": 2}


def test_views_emit_no_instruction(backend, rng):
    def function(_ops, x):
        return (x[1:3].reshape(2, 4, 8) * 2.0)[..., 2:]

    assert both(backend, function, *inputs(rng)) == {"scale": 1}


def test_a_reshape_across_strides_copies(backend, rng):
    def function(_ops, x):
        return x[:, 4:12].reshape(-1, 5) * 2.0

    assert both(backend, function, *inputs(rng)) == {"python": 1, "scale": 1}


def test_numpy_functions_are_refused(backend, rng):
    program, _ = recorded(backend, lambda _ops, x: np.concatenate([x, x]))
    with pytest.raises(KernelFailed, match="concatenate: not supported on a tensor"):
        program(None, inputs(rng)[0], ())


def test_in_place_operators_are_refused(backend, rng):
    def function(_ops, x):
        x += x
        return x

    program, _ = recorded(backend, function)
    with pytest.raises(KernelFailed, match="add: not supported on a tensor; use"):
        program(None, inputs(rng)[0], ())


def test_a_norm_is_fused_into_the_product_that_reads_it(backend, rng):
    w, norm = linear(backend, rng), Norm(floats(rng, HIDDEN))

    def function(ops, x):
        delta = x * 2.0
        total, y = ops.reduce_add_norm(x, delta, norm, eps=1e-5)
        return ops.linear(y, w), total

    found = both(backend, function, *inputs(rng))
    assert found == {"scale": 1, "linear": 1}

    def alone(ops, x):
        return ops.linear(ops.rms_norm(x, norm, eps=1e-5), w)

    assert both(backend, alone, *inputs(rng)) == {"linear": 1}


def test_a_norm_whose_operand_the_product_overwrites_is_not_fused(backend, rng):
    w, norm = linear(backend, rng), Norm(floats(rng, HIDDEN))

    def function(ops, x):
        # The delta is not referenced: its memory is reused for the product.
        total, y = ops.reduce_add_norm(x, x * 2.0, norm, eps=1e-5)
        return ops.linear(y, w), total

    found = both(backend, function, *inputs(rng))
    assert found == {"scale": 1, "add_norm": 1, "linear": 1}


def test_a_norm_with_other_readers_is_not_fused(backend, rng):
    w, norm = linear(backend, rng), Norm(floats(rng, HIDDEN))

    def twice(ops, x):
        y = ops.rms_norm(x, norm, eps=1e-5)
        return ops.linear(y, w), ops.linear(y, w)

    assert both(backend, twice, *inputs(rng))["rms_norm"] == 1

    def returned(ops, x):
        y = ops.rms_norm(x, norm, eps=1e-5)
        return ops.linear(y, w), y

    assert both(backend, returned, *inputs(rng))["rms_norm"] == 1


def test_an_op_without_a_native_kernel_is_a_python_step(backend, rng):
    w = linear(backend, rng, rows=40)
    masks = rng.integers(-(2**31), 2**31, (5, 2)).astype(np.int32)

    def function(ops, x):
        return ops.mask_logits(ops.linear(x, w), masks) * 0.5

    found = both(backend, function, *inputs(rng))
    assert found == {"linear": 1, "python": 1, "scale": 1}


def test_a_program_is_recorded_for_each_state(backend, rng):
    """A state of the same shapes is recorded again, not overwritten."""

    def run(_weights, message, state):
        return message * 1.0, (state[0] + message,)

    program = Program(run, backend.emitter, backend.programs)
    x, first, second = (np.ones((2, 3), np.float32) * n for n in (1, 2, 3))
    for _ in range(2):
        program(None, x, (first,))
        program(None, x, (second,))
    assert (first == 4).all()
    assert (second == 5).all()


def test_the_number_of_programs_is_bounded(backend):
    for size in range(1, 80):
        program = Program(
            lambda _w, m, state: (m * 2.0, state), backend.emitter, backend.programs
        )
        program(None, np.ones((size, 2), np.float32), ())
    assert len(backend.programs) == 64


def test_a_failure_while_recording_is_cleaned_up(backend):
    def run(_weights, message, state):
        raise ValueError("no")

    program = Program(run, backend.emitter, backend.programs)
    with pytest.raises(ValueError, match="no"):
        program(None, np.ones((2, 2), np.float32), ())
    assert backend.emitter.recording is None
    assert not backend.programs


def test_a_refused_instruction_raises_with_the_reason(backend):
    x = np.ones((2, 4), np.float32)
    call = RmsNorm(
        rows=2, heads=1, head_width=4, x_stride=4, y_stride=4, x=x, y=None, eps=1e-5
    )
    with pytest.raises(KernelFailed, match="instruction 1: rms_norm: y is missing"):
        backend.emitter.emit(call)


class Chain:
    """A random chain of ops whose results have random lifetimes."""

    def __init__(self, backend, seed):
        rng = np.random.default_rng(seed)
        self.seed = seed
        self.square = linear(backend, rng, rows=HIDDEN)
        self.norm = Norm(floats(rng, HIDDEN))
        parts = {name: wrap(floats(rng, HIDDEN, HIDDEN)) for name in "qkv"}
        self.qkv = pack_qkv(backend.emitter, parts, backend, "float32")
        mlp = {name: wrap(floats(rng, 48, HIDDEN)) for name in ("gate", "up")}
        mlp["down"] = wrap(floats(rng, HIDDEN, 48))
        self.mlp = pack_mlp(backend.emitter, mlp, backend, "float32")

    def __call__(self, ops, x):
        rng = np.random.default_rng(self.seed)
        live = [x]
        for _ in range(40):
            a, b = (live[rng.integers(len(live))] for _ in range(2))
            live.append(self.one(ops, int(rng.integers(7)), a, b))
            if len(live) > 4:
                live.pop(int(rng.integers(len(live))))
        return tuple(live)

    def one(self, ops, kind, a, b):
        if kind == 0:
            return (a + b) * 0.5
        if kind == 1:
            total, y = ops.reduce_add_norm(a, b, self.norm, eps=1e-5)
            return ops.linear(y, self.square) * 0.1 + total * 0.5
        if kind == 2:
            return ops.linear(ops.rms_norm(a, self.norm, eps=1e-5), self.square)
        if kind == 3:
            return ops.gated_mlp(
                ops.rms_norm(a, self.norm, eps=1e-5), self.mlp, activation="silu"
            )
        if kind == 4:
            q, k, v = ops.qkv_linear(ops.rms_norm(a, self.norm, eps=1e-5), self.qkv)
            return (q + k) * 0.1 - v * 0.1
        if kind == 5:
            _, y = ops.reduce_add_norm(b, a, self.norm, eps=1e-5)
            return y
        return ops.rms_norm(a - b, self.norm, eps=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_scratch_memory_reuse_is_safe(backend, seed):
    """Random chains: overwriting a live buffer changes the results."""
    chain = Chain(backend, seed)
    ops = DynamicOps(tuple(backend.kernels()))
    program, _ = recorded(backend, chain)
    rng = np.random.default_rng(seed)
    for rows in (3, 3, 3):
        x = floats(rng, rows, HIDDEN)
        want = chain(ops, x)
        found, _ = program(None, x, ())
        for got, exact in zip(found, want, strict=True):
            scale = np.abs(exact).max() + 1e-6
            np.testing.assert_allclose(got / scale, exact / scale, atol=2e-4)


@pytest.fixture
def frames():
    limits = Limits(4, (9,), 16, 2, 96)
    table = [[1, 2]], [[3, 4]]
    common = {"groups": 1, "block_size": 16}
    return limits, [
        admit_frame(1, table[0], groups=1, max_blocks_per_seq=2),
        admit_frame(2, table[1], groups=1, max_blocks_per_seq=2),
        step_frame(
            Bucket(5, 1), [Row(1, [3, 1, 4, 1, 5])], step=0, decode_rows=0, **common
        ),
        step_frame(
            Bucket(4, 2), [Row(1, [-1]), Row(2, [9, 2, 6])], step=1, decode_rows=1,
            **common,
        ),
        *(
            step_frame(
                Bucket(2, 2), [Row(1, [-1]), Row(2, [-1])], step=n, decode_rows=2,
                **common,
            )
            for n in range(2, 8)
        ),
    ]  # fmt: skip


def answers(runner, messages, after=lambda _message: None):
    """The tokens of each step; ``after`` is called with every submitted frame."""
    found = []
    for message in messages:
        frame = message.copy()
        runner.submit(frame)
        after(frame)
        if message[HEADER_WORD.kind] == STEP:
            found.append(runner.collect().tokens.ravel().tolist())
    return found


@pytest.fixture
def model_runner(backend, frames):
    files = MemoryCheckpoint(*tiny_llama(np.random.default_rng(3)))
    return local_runner(backend, MODEL, files, frames[0])


def test_the_frame_of_a_step_is_copied_once(model_runner, frames, monkeypatch):
    _, messages = frames
    run, given = RecordedProgram.__call__, []

    def call(program, frame):
        given.append(frame)
        results = run(program, frame)
        assert np.array_equal(program.frame, frame)
        assert not np.shares_memory(program.frame, frame)
        return results

    def is_the_caller_s(frame):
        if frame[HEADER_WORD.kind] == STEP:
            assert given.pop().ctypes.data == frame.ctypes.data

    monkeypatch.setattr(RecordedProgram, "__call__", call)
    assert len(answers(model_runner, messages, is_the_caller_s)) == 8
    assert not given


def test_a_frame_may_change_once_it_is_submitted(model_runner, frames):
    _, messages = frames
    whole = answers(model_runner, messages)
    model_runner.reset()
    assert answers(model_runner, messages, lambda frame: frame.fill(-7)) == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_gives_the_same_tokens_recorded_and_immediately(
    backend, frames, dtype, monkeypatch
):
    limits, messages = frames
    config, tensors = tiny_llama(np.random.default_rng(3))
    files = MemoryCheckpoint(config, tensors)

    def tokens():
        runner = local_runner(backend, MODEL, files, limits, dtype=dtype)
        return answers(runner, messages)

    whole = tokens()
    steps = list(backend.programs.values())
    counts = [
        Counter(item.spec().name for item in r.steps if isinstance(item, Instruction))
        for r in steps
    ]
    # In a step with prompts the last layer rotates and caches before attention.
    assert [count["rope"] for count in counts] == [2, 2, 0]
    assert all("add_norm" not in count for count in counts)
    monkeypatch.setattr(type(backend), "compile", lambda *args, **_: args[1])
    assert tokens() == whole
