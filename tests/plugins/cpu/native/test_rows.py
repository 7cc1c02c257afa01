"""Elementwise operations, norms, RoPE and copies, compared with the ops' bodies."""

from __future__ import annotations

import numpy as np
import pytest
from native_harness import Flag, Op, f32, i32, instruction

from inl.ops import catalog
from inl.ops.rope import frequencies
from inl.spec.tolerance import judge

CATALOG = catalog()
SEED = 7


def cases(name):
    return list(CATALOG[name].cases(np.random.default_rng(SEED)))


def judged(name, case, *results):
    verdict = judge(CATALOG[name], case, "float32", results)
    assert verdict.passed, f"{name}/{case.name}: {verdict}"


@pytest.mark.parametrize(
    ("opcode", "combined"),
    [(Op.ADD, np.add), (Op.SUB, np.subtract), (Op.MUL, np.multiply)],
)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 8192, 20001])
def test_elementwise_is_exact(native, rng, opcode, combined, count):
    a, b = f32(rng.standard_normal((2, count)))
    y = np.empty(count, np.float32)
    native.run(instruction(opcode, (count,), (a, b, y)))
    assert np.array_equal(y, combined(a, b))
    native.run(instruction(opcode, (count,), (a, b, a)))
    assert np.array_equal(a, y)


@pytest.mark.parametrize("count", [1, 17, 20001])
def test_scale_shift_and_zero(native, rng, count):
    x, y = f32(rng.standard_normal(count)), np.empty(count, np.float32)
    native.run(instruction(Op.SCALE, (count,), (x, y), (0.7, -2.5)))
    assert np.array_equal(y, x * np.float32(0.7) + np.float32(-2.5))
    native.run(instruction(Op.ZERO, (count,), (y,)))
    assert not y.any()


def test_copy_between_strides(native, rng):
    x, y = f32(rng.standard_normal((9, 20))), np.zeros((9, 7), np.float32)
    native.run(instruction(Op.COPY, (9, 5, 20, 7), (x, y)))
    assert np.array_equal(y[:, :5], x[:, :5])
    assert not y[:, 5:].any()


def test_take_rows_with_indices_out_of_range(native, rng):
    x, index = f32(rng.standard_normal((6, 5))), i32([5, 0, 0, -1, 6])
    y = np.empty((5, 5), np.float32)
    native.run(instruction(Op.TAKE_ROWS, (5, 5, 5, 6), (x, index, y)))
    assert np.array_equal(y[:3], x[[5, 0, 0]])
    assert not y[3:].any()


@pytest.mark.parametrize("case", cases("rms_norm"), ids=lambda case: case.name)
def test_rms_norm(native, case):
    x, weight = f32(case.args[0]), f32(case.args[1].weight)
    y = np.empty_like(x)
    width, heads = x.shape[-1], x[0].size // x.shape[-1]
    dims = len(x), heads, width, heads * width, heads * width
    native.run(instruction(Op.RMS_NORM, dims, (x, weight, y), (case.attrs["eps"],)))
    judged("rms_norm", case, y)


@pytest.mark.parametrize("case", cases("reduce_add_norm"), ids=lambda case: case.name)
def test_add_norm(native, case):
    residual, delta = (f32(array) for array in case.args[:2])
    weight, y = f32(case.args[2].weight), np.empty_like(residual)
    data = residual, delta, weight, delta, y
    native.run(instruction(Op.ADD_NORM, residual.shape, data, (case.attrs["eps"],)))
    judged("reduce_add_norm", case, delta, y)


def test_norms_with_plus_one(native, rng):
    x, weight = f32(rng.standard_normal((3, 40))), f32(rng.standard_normal(40))
    actual, expected = np.empty_like(x), np.empty_like(x)
    dims = 3, 1, 40, 40, 40
    native.run(
        instruction(Op.RMS_NORM, dims, (x, weight, actual), (1e-5,), Flag.PLUS_ONE),
        instruction(Op.RMS_NORM, dims, (x, 1 + weight, expected), (1e-5,)),
    )
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("case", cases("gated_activation"), ids=lambda case: case.name)
def test_gated_activation(native, case):
    gate, up = (f32(array) for array in case.args)
    flag = {"silu": Flag.GATE_SILU, "gelu_tanh": Flag.GATE_GELU}
    y, (rows, width) = np.empty_like(gate), gate.shape
    dims = rows, width, width, width, width
    flags = flag[case.attrs["activation"]]
    native.run(instruction(Op.GATED, dims, (gate, up, y), flags=flags))
    judged("gated_activation", case, y)


@pytest.mark.parametrize("flag", [Flag.GATE_SILU, Flag.GATE_GELU])
def test_activations_of_extreme_inputs(native, flag):
    gate = f32([[-3e38, -1e10, -90, -88, -1e-40, 0, 1e-40, 88, 90, 3e38]])
    y = np.empty_like(gate)
    dims = 1, gate.size, gate.size, gate.size, gate.size
    native.run(instruction(Op.GATED, dims, (gate, np.ones_like(gate), y), flags=flag))
    assert np.abs(y[0, :4]).max() < 1e-30
    assert np.abs(y[0, 4:7]).max() < 1e-39
    assert np.array_equal(y[0, 7:], gate[0, 7:])


@pytest.mark.parametrize("case", cases("rope"), ids=lambda case: case.name)
def test_rope(native, case):
    q, k, cos, sin = (f32(array) for array in case.args)
    results = []
    for x in (q, k):
        tokens, heads, width = x.shape
        dims = tokens, heads, width, heads * width, heads * width
        y = np.empty_like(x)
        native.run(instruction(Op.ROPE, dims, (x, cos, sin, y)))
        native.run(instruction(Op.ROPE, dims, (x, cos, sin, x)))
        assert np.array_equal(x, y)
        results.append(y)
    judged("rope", case, *results)


@pytest.mark.parametrize("case", cases("rope_table"), ids=lambda case: case.name)
def test_rope_table(native, case):
    positions, attrs = i32(case.args[0]), case.attrs
    scaling = attrs["scaling"]
    rates = frequencies(attrs["dim"], attrs["theta"], attrs["scaling"])
    rates = np.ascontiguousarray(rates, np.float64)
    cos, sin = np.empty((2, len(positions), len(rates)), np.float32)
    dims = len(positions), len(rates), (scaling.rotary_dim or attrs["dim"]) // 2
    data = positions, rates, cos, sin
    native.run(instruction(Op.ROPE_TABLE, dims, data, (scaling.gain,)))
    judged("rope_table", case, cos, sin)


@pytest.mark.parametrize("case", cases("embedding"), ids=lambda case: case.name)
def test_embedding(native, case):
    ids, weight = i32(case.args[0]), f32(case.args[1].weight)
    matrix = native.pack("float32", weight)
    y = np.empty((len(ids), weight.shape[1]), np.float32)
    dims = len(ids), weight.shape[1]
    native.run(instruction(Op.EMBEDDING, dims, (ids, matrix, y), (1.0,)))
    assert np.array_equal(y, weight[ids])
    native.run(instruction(Op.EMBEDDING, dims, (ids, matrix, y), (3.0,)))
    assert np.array_equal(y, 3 * weight[ids])


def test_read_covers_the_whole_buffer(native, rng):
    x = rng.integers(0, 2**31, 3 << 19, dtype=np.int64).astype(np.uint32)
    y = np.zeros(1, np.uint64)
    native.run(instruction(Op.READ, (x.nbytes,), (x, y)))
    before = int(y[0])
    x[-1] += 1
    native.run(instruction(Op.READ, (x.nbytes,), (x, y)))
    assert int(y[0]) == before + 1
