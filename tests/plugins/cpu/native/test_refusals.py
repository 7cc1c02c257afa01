"""Invalid instructions are refused with a reason, before any instruction runs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from native_harness import (
    Flag,
    Matrix,
    Native,
    Op,
    Refused,
    aligned,
    f32,
    i32,
    instruction,
)

from inl_cpu.abi import KINDS, Format, MatrixStruct, Scale

X = f32(np.ones((4, 64)))
Y = np.zeros((4, 64), np.float32)


@pytest.fixture(scope="module")
def scalar(lib):
    opened = Native(lib, "scalar")
    yield opened
    opened.close()


def matrix(**changes):
    fields = {
        "format": 4,
        "group": 32,
        "zero": 8,
        "scale": 0,
        "rows": 64,
        "columns": 64,
    }
    return Matrix(MatrixStruct(**fields | changes), aligned(4096))


def linear(weights, flags=0, dims=(4, 64, 64), **data):
    places = [X, weights, None, Y, None, None, None]
    for place, value in data.items():
        places[int(place[1:])] = value
    return instruction(Op.LINEAR, dims, tuple(places), flags=flags)


def attention(**changes):
    dims = [4, 4, 2, 16, 4, 4, 2, 0, 64, 32]
    for place, value in changes.items():
        dims[int(place[1:])] = value
    return instruction(Op.ATTENTION, dims, (X, None, None, *[X] * 8))


BAD = {
    f"opcode {len(Op)}: unknown, accepted are 0 to {len(Op) - 1}": [
        instruction(len(Op))
    ],
    "opcode -1: unknown": [instruction(-1)],
    "opcode 2147483647: unknown": [instruction(2**31 - 1)],
    "add: count must not be negative": [instruction(Op.ADD, (-1,), (X, X, Y))],
    "linear: x_stride must not be": [linear(matrix(), dims=(4, -64, 64))],
    "add: y is missing": [instruction(Op.ADD, (4,), (X, X))],
    "linear: matrix is missing": [linear(None)],
    "add_norm: y is missing": [instruction(Op.ADD_NORM, (1, 4), (X, X, X, Y))],
    "sample: tokens is missing": [instruction(Op.SAMPLE, (1, 4, 4, 1), (X,))],
    "write_kv: writes is missing": [
        instruction(Op.WRITE_KV, (1, 1, 2, 4, 2), (X, X, Y, Y))
    ],
    "add: does not accept flags 1": [instruction(Op.ADD, (4,), (X, X, Y), flags=1)],
    "matrix: rows and columns": [linear(matrix(rows=0)), linear(matrix(columns=-32))],
    "matrix: accepted formats": [
        linear(matrix(format=len(Format))),
        linear(matrix(format=-1)),
    ],
    "matrix: groups must have 16": [
        linear(matrix(group=0)),
        linear(matrix(group=16)),
        linear(matrix(format=6)),
    ],
    "matrix: groups of 16 columns require": [linear(matrix(format=6, group=16))],
    "matrix: columns must be whole blocks": [
        linear(matrix(columns=65)),
        linear(matrix(scale=1)),
    ],
    "matrix: accepted scales": [
        linear(matrix(scale=len(Scale))),
        linear(matrix(scale=-1)),
    ],
    "matrix: IQ1 and IQ2 require scales in eighths": [
        linear(matrix(format=Format.IQ2, zero=128, scale=Scale.BYTE, columns=256)),
        linear(matrix(format=Format.IQ1, group=16, scale=Scale.WIDE, columns=256)),
    ],
    "matrix: scales of 6 bits are for groups of 16": [
        linear(matrix(scale=4, columns=256)),
        linear(matrix(format=3, group=16, zero=4, scale=4, offsets=1, columns=256)),
    ],
    "matrix: exponents and eighths have no offsets": [
        linear(matrix(scale=Scale.EXPONENT, offsets=1)),
        linear(matrix(scale=Scale.EIGHTHS, offsets=1, columns=256)),
    ],
    "matrix: zero must be": [linear(matrix(zero=16)), linear(matrix(zero=-1))],
    "matrix: zero of codes of 8 bits is 128": [
        linear(matrix(format=Format.U8, zero=8))
    ],
    "matrix: middle must be": [linear(matrix(middle=16))],
    "accepts one activation": [linear(matrix(), Flag.GATE_SILU | Flag.GATE_GELU)],
    "a gate takes whole pairs": [
        linear(matrix(rows=48), Flag.GATE_SILU, (4, 64, 64, 24)),
        linear(matrix(), Flag.GATE_SILU, (4, 64, 64, 33)),
        linear(matrix(), Flag.GATE_SILU, (4, 64, 64, 32), p2=X),
    ],
    "integer x is for quantized": [
        linear(matrix(), Flag.X_BF16),
        linear(matrix(format=0, group=0), Flag.X_INT8),
    ],
    "delta requires norm_weight": [linear(matrix(), p4=X)],
    "sum must be neither": [linear(matrix(), p4=Y, p5=X, p6=X)],
    "rms_norm: y is missing": [instruction(Op.RMS_NORM, (1, 1, 4, 4, 4), (X, X))],
    "gated: requires an activation": [
        instruction(Op.GATED, (1, 4, 4, 4, 4), (X, X, Y))
    ],
    "attention: heads must be": [attention(d2=3), attention(d2=0)],
    "cache: accepts one of": [
        instruction(
            Op.WRITE_KV,
            (1, 1, 4, 4, 4),
            (X, X, Y, Y, X),
            flags=Flag.KV_BF16 | Flag.KV_INT8,
        ),
    ],
    "cache: head_width": [
        instruction(Op.WRITE_KV, (1, 1, 3, 4, 3), (X, X, Y, Y, X)),
        attention(d3=15),
        attention(d3=0),
    ],
    "cache: block_size": [
        instruction(Op.READ_CACHE, (1, 0, 1, 2), (X, X, Y, Y)),
        attention(d4=0),
    ],
    "sample: vocabulary must be": [instruction(Op.SAMPLE, (1, 0, 0, 1), (X, Y))],
    "sample: samples must be": [instruction(Op.SAMPLE, (3, 4, 4, 2), (X, Y))],
    "sample: random sampling requires": [
        instruction(Op.SAMPLE, (1, 4, 4, 1), (X, Y), flags=Flag.SAMPLE_RANDOM)
    ],
    "score: vocabulary must be": [instruction(Op.SCORE, (1, 0, 0, 0), (X, X, Y, Y, Y))],
    "score: count must be": [
        instruction(Op.SCORE, (1, 4, 4, 0), (X, X, Y, Y, Y)),
        instruction(Op.SCORE, (1, 4, 4, 5), (X, X, Y, Y, Y)),
    ],
    "pack: columns differ": [instruction(Op.PACK, (4, 32, 0, 3), (X, matrix()))],
    "pack: unknown kind": [
        instruction(Op.PACK, (4, 64, 0, 99), (X, matrix())),
        instruction(Op.PACK, (4, 64, 0, KINDS["q4_k"]), (X, matrix())),
    ],
    "pack: the kind requires a codebook": [
        instruction(Op.PACK, (4, 256, 0, kind), (X, matrix(columns=256)))
        for kind in range(KINDS["iq1_s"], len(KINDS))
    ],
    "pack: the matrix has": [
        instruction(Op.PACK, (4, 64, 0, KINDS["q8_0"]), (X, matrix())),
        instruction(Op.PACK, (4, 64, 0, KINDS["float32"]), (X, matrix())),
    ],
    "pack: rows exceed": [
        instruction(
            Op.PACK, (4, 64, 61, KINDS["float32"]), (X, matrix(format=0, group=0))
        ),
    ],
}


@pytest.mark.parametrize("reason", BAD)
def test_invalid_instructions_are_refused(scalar, reason):
    for bad in BAD[reason]:
        with pytest.raises(Refused, match=reason):
            scalar.run(bad)


def test_a_matrix_without_data(scalar):
    empty = matrix()
    empty.struct.data = None
    with pytest.raises(Refused, match="matrix: it has no data"):
        scalar.run(linear(empty))


def test_the_first_invalid_instruction_is_reported_and_none_runs(scalar):
    y = np.zeros(4, np.float32)
    good = instruction(Op.ADD, (4,), (X, X, y))
    with pytest.raises(Refused, match=r"^3: opcode 99: unknown"):
        scalar.run(good, good, instruction(99), instruction(98))
    assert not y.any()
    scalar.run(good)
    assert y.tolist() == [2, 2, 2, 2]


def test_empty_programs_and_sizes_are_accepted(scalar):
    scalar.run()
    scalar.run(instruction(Op.ADD, (0,), (X, X, Y)))
    scalar.run(linear(matrix(), dims=(0, 64, 64)))


@pytest.mark.parametrize(
    ("threads", "isa"), [(0, 0), (-1, 0), (4097, 0), (1, 9), (1, -1)]
)
def test_invalid_pools(lib, threads, isa):
    assert not lib.inl_open(threads, isa)


def test_invalid_sizes(lib):
    sizes = lib.inl_cache_bytes
    assert sizes(4, 16, 3, 64, 0) == 4 * 3 * 16 * 64 * 4
    assert sizes(4, 16, 3, 64, Flag.KV_BF16) == 4 * 3 * 16 * 64 * 2
    assert sizes(4, 16, 3, 64, Flag.KV_INT8) == 4 * 3 * 16 * (64 + 4)
    for bad in (
        (0, 16, 3, 64),
        (4, 0, 3, 64),
        (4, 16, 0, 64),
        (4, 16, 3, 63),
        (4, 16, 3, 0),
    ):
        assert sizes(*bad, 0) == -1
    assert lib.inl_source_bytes(KINDS["q4_k"], 512) == 288
    assert lib.inl_source_bytes(KINDS["q4_k"], 511) == -1
    assert lib.inl_source_bytes(-1, 512) == -1
    assert lib.inl_packing(len(KINDS), ctypes.byref(MatrixStruct())) == -1
    assert lib.inl_matrix_bytes(ctypes.byref(matrix(columns=65).struct)) == -1


def test_fed_tokens_out_of_range_are_not_counted(scalar):
    # Slots are not checked: they come from the scheduler.
    logits, counts = f32(np.zeros((1, 4))), np.zeros((1, 4), np.int32)
    bias, params = np.zeros((1, 4), np.float32), np.zeros((1, 7), np.float32)
    for fed in (-1, 4):
        data = logits, i32([0]), params, counts, bias, i32([fed])
        scalar.run(instruction(Op.PENALIZE, (1, 4, 4, 1), data))
    assert not counts.any()
