"""Mixtures of experts: products with packed experts, routing and sums."""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
from native_blocks import HALVES, random_blocks
from native_harness import (
    Flag,
    Matrix,
    Op,
    Refused,
    excess,
    f32,
    i32,
    instruction,
    product_excess,
    weights_of,
)

from inl.ops import catalog
from inl.ops.mlp import gated_activation
from inl.ops.moe import KINDS as ROUTES
from inl.ops.moe import combine_experts, route, sigmoid_gate

KINDS = sorted(HALVES)
COLUMNS = 512


def expert_linear(native, x, ids, matrix, experts, width, *, flags=0, sharing=1):
    y = np.full((ids.size, width), np.nan, np.float32)
    dims = ids.size, sharing, experts, width, x.shape[1]
    native.run(instruction(Op.EXPERT_LINEAR, dims, (x, ids, matrix, y), flags=flags))
    return y


def packed(native, rng, kind, experts, rows):
    """A matrix of experts whose rows are padded to 16, and the weights of each."""
    size = 16 * -(-rows // 16)
    matrix = native.packing(kind, experts * size, COLUMNS)
    weights = []
    for expert in range(experts):
        source = random_blocks(rng, kind, rows, COLUMNS)
        native.pack(kind, source, matrix, first=expert * size)
        weights.append(weights_of(kind, source, (rows, COLUMNS)))
    return matrix, weights


def choices(rng, tokens, k, experts):
    return i32([rng.permutation(experts)[:k] for _ in range(tokens)])


@pytest.mark.parametrize("mode", [Flag.X_EXACT, Flag.X_INT16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_chosen_experts(native, rng, kind, mode):
    """From one choice to blocks of more rows than a chunk has."""
    matrix, weights = packed(native, rng, kind, 3, 37)
    for tokens, k in ((1, 1), (1, 2), (5, 2), (150, 2)):
        x = f32(rng.standard_normal((tokens, COLUMNS)))
        ids = choices(rng, tokens, k, 3)
        y = expert_linear(native, x, ids, matrix, 3, 37, flags=mode, sharing=k)
        y = y.reshape(tokens, k, 37)
        for expert in range(3):
            token, slot = np.nonzero(ids == expert)
            if len(token):
                dtype = "float32" if mode == Flag.X_EXACT else "bfloat16"
                part = y[token, slot]
                assert product_excess(part, x[token], weights[expert], dtype) <= 1


@pytest.mark.parametrize("mode", [Flag.X_EXACT, Flag.X_INT8, Flag.X_INT16])
def test_a_result_has_the_same_bits_in_any_batch(native, rng, mode):
    """Those of a dense product with the expert alone, int8 with outliers included."""
    matrix, _ = packed(native, rng, "q4_k", 4, 48)
    x = f32(rng.standard_normal((161, COLUMNS)) * rng.uniform(0.1, 3, (161, 1)))
    x[::7, 3] = 90.0
    # More than a block, blocks of a few rows, and one of a single row.
    ids = rng.permutation(i32([0] * 109 + [1] * 31 + [2] * 20 + [3])).reshape(161, 1)
    y = expert_linear(native, x, ids, matrix, 4, 48, flags=mode)
    size = matrix.memory.nbytes // 4
    for expert in range(4):
        one = native.packing("q4_k", 48, COLUMNS)
        one.memory[:] = matrix.memory[expert * size : (expert + 1) * size]
        for row in np.nonzero(ids[:, 0] == expert)[0]:
            assert np.array_equal(
                native.linear(x[row : row + 1], one, mode=mode)[0], y[row]
            )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [32, 41])
def test_gated_experts(native, rng, activation, inner):
    size, weights = 2 * 16 * -(-inner // 16), []
    matrix = native.packing("q6_k", 5 * size, COLUMNS)
    for expert in range(5):
        pair = [random_blocks(rng, "q6_k", inner, COLUMNS) for _ in range(2)]
        for part, source in enumerate(pair):
            first = expert * size + 16 * part
            native.pack("q6_k", source, matrix, first=first, flags=Flag.INTERLEAVE)
        weights.append([weights_of("q6_k", one, (inner, COLUMNS)) for one in pair])
    flag = Flag.GATE_SILU if activation == "silu" else Flag.GATE_GELU
    x, ids = f32(rng.standard_normal((9, COLUMNS))), choices(rng, 9, 2, 5)

    def body(x):
        def one(token, expert):
            parts = (x[token] @ w.T.astype(x.dtype) for w in weights[expert])
            return gated_activation.body(*parts, activation=activation)

        return [one(token, e) for token in range(9) for e in ids[token]]

    y = expert_linear(native, x, ids, matrix, 5, inner, flags=flag, sharing=2)
    assert excess(y, np.array(body(x.astype(np.float64))), body(x), "float32") <= 1


def test_plain_experts(native, rng):
    weights = f32(rng.standard_normal((3, 20, 50)))
    matrix = native.packing("float32", 3 * 32, 50)
    for expert in range(3):
        native.pack("float32", weights[expert], matrix, first=32 * expert)
    x, ids = f32(rng.standard_normal((11, 50))), choices(rng, 11, 1, 3)
    y = expert_linear(native, x, ids, matrix, 3, 20)
    for row in range(11):
        expert = weights[ids[row, 0]].astype(np.float64)
        assert product_excess(y[row : row + 1], x[row : row + 1], expert, "float32") < 1


def test_ids_out_of_range_give_zeros(native, rng):
    matrix, _ = packed(native, rng, "q8_0", 2, 16)
    x, ids = f32(rng.standard_normal((4, COLUMNS))), i32([[0], [2], [-1], [1]])
    y = expert_linear(native, x, ids, matrix, 2, 16)
    assert not y[1:3].any()
    assert y[[0, 3]].all()


@pytest.mark.skipif(not hasattr(mmap, "PROT_READ"), reason="needs mprotect")
def test_experts_that_nobody_chose_are_not_read(native, rng):
    """Their memory is not readable, so that a read ends the process."""
    page, rows = mmap.PAGESIZE, 256
    matrix, weights = packed(native, rng, "q4_0", 3, rows)
    size = matrix.memory.nbytes // 3
    assert size % page == 0
    memory = mmap.mmap(-1, 3 * size)
    view = np.frombuffer(memory, np.uint8)
    view[:] = matrix.memory
    guarded = Matrix(matrix.struct, view)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    middle = view.ctypes.data + size
    assert protect(middle, size, 0) == 0
    x, ids = f32(rng.standard_normal((6, COLUMNS))), i32([[0], [2]] * 3)
    try:
        y = expert_linear(native, x, ids, guarded, 3, rows)
    finally:
        protect(middle, size, mmap.PROT_READ | mmap.PROT_WRITE)
    for start in range(2):
        part = y[start::2], x[start::2], weights[2 * start]
        assert product_excess(*part, "float32") <= 1


def test_what_does_not_fit_is_refused(native, rng):
    matrix, _ = packed(native, rng, "q4_0", 2, 32)
    x, ids = np.zeros((2, COLUMNS), np.float32), i32([[0, 1], [1, 0]])

    def run(experts=2, width=32, **options):
        return expert_linear(native, x, ids, matrix, experts, width, **options)

    for options, reason in (
        ({"experts": 3}, "whole tiles"),
        ({"experts": 0}, "whole tiles"),
        ({"width": 33}, "width exceeds"),
        ({"width": 17, "flags": Flag.GATE_SILU}, "width exceeds"),
        ({"sharing": 3}, "multiple of sharing"),
        ({"flags": Flag.X_BF16}, "integer x is for quantized"),
        ({"flags": Flag.GATE_MASK}, "one activation"),
    ):
        with pytest.raises(Refused, match=reason):
            run(**options)
    logits = np.zeros((1, 4), np.float32)
    for k, kind in ((0, 0), (5, 0), (2, 3)):
        with pytest.raises(Refused, match="route: "):
            routed(native, logits, k=k, kind=kind, renormalize=0)


def routed(native, logits, *, k, kind, renormalize):
    rows, experts = logits.shape
    ids, weights = np.full((rows, k), -1, np.int32), np.empty((rows, k), np.float32)
    dims = rows, experts, k, kind, renormalize, experts
    native.run(instruction(Op.ROUTE, dims, (logits, ids, weights)))
    return ids, weights


def routing_cases():
    rng = np.random.default_rng(3)
    yield from catalog()["route"].cases(rng)
    wide = 3 * rng.standard_normal((9, 130))
    wide[1, 4] = wide[2, 5] = np.nan
    wide[3, 6], wide[4] = np.inf, -np.inf
    wide[5, 7] = -np.inf
    for kind in ROUTES:
        for renormalize in (False, True):
            attrs = {"k": 7, "kind": kind, "renormalize": renormalize}
            yield SimpleNamespace(name=f"edges/{kind}/{renormalize}", args=(wide,),
                                  attrs=attrs)  # fmt: skip


@pytest.mark.parametrize("case", list(routing_cases()), ids=lambda case: case.name)
def test_routing(native, case):
    logits = f32(case.args[0])
    attrs = {**case.attrs, "kind": ROUTES.index(case.attrs["kind"])}
    ids, weights = routed(native, logits, **attrs)
    exact_ids, exact = route.body(logits.astype(np.float64), **case.attrs)
    assert np.array_equal(ids, exact_ids)
    np.testing.assert_allclose(weights, exact, rtol=2e-6, atol=1e-7)


def test_sums_of_slots_and_gates(native, rng):
    y, weights = f32(rng.standard_normal((7, 3, 37))), f32(rng.random((7, 3)))
    out = np.empty((7, 37), np.float32)
    native.run(instruction(Op.COMBINE_EXPERTS, (7, 37, 3), (y, weights, out)))
    exact = combine_experts.body(y.astype(np.float64), weights.astype(np.float64))
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
    gate = f32([[-100], [-8], [0], [0.3], [8], [100], [np.nan]])
    result = np.empty((7, 37), np.float32)
    native.run(instruction(Op.SIGMOID_GATE, (7, 37, 37, 1), (out, gate, result)))
    exact = sigmoid_gate.body(out.astype(np.float64), gate.astype(np.float64))
    np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)
