"""Runs native instructions on NumPy arrays, and computes error bounds."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass

import numpy as np
from native_blocks import random_blocks

from inl.checkpoints.blocks.codebooks import codebook
from inl.checkpoints.blocks.dtypes import BLOCKS, dequantize
from inl.dtypes import EPSILON, HostArray, rounded
from inl.spec.tolerance import FLOOR
from inl_cpu.abi import DATA, DIMS, INSTRUCTION, ISAS, KINDS, REALS, Flag, MatrixStruct
from inl_cpu.instructions import Opcode as Op
from inl_cpu.library import declare_signatures


def library(path):
    loaded = ctypes.CDLL(str(path))
    declare_signatures(loaded)
    return loaded


class Refused(Exception):
    """An instruction was refused; the message is the library's."""


class Native:
    """A pool of threads of one instruction set."""

    def __init__(self, lib, isa, threads=1):
        self.lib, self.isa = lib, isa
        self.pool = lib.inl_open(threads, ISAS.index(isa))
        assert self.pool, f"{isa} with {threads} threads"

    def close(self):
        self.lib.inl_close(self.pool)

    def run(self, *instructions):
        program = b"".join(one.bytes for one in instructions)
        refused = self.lib.inl_run(self.pool, program, len(instructions))
        if refused:
            why = self.lib.inl_refusal(self.pool).decode()
            raise Refused(f"{refused}: {why}")

    def packing(self, kind, rows, columns):
        """An empty matrix with the packing of ``kind``."""
        struct = MatrixStruct(rows=rows, columns=columns)
        assert self.lib.inl_packing(KINDS[kind], ctypes.byref(struct)) == 0
        return self.allocated(struct)

    def allocated(self, struct):
        size = self.lib.inl_matrix_bytes(ctypes.byref(struct))
        assert size > 0
        return Matrix(struct, aligned(size))

    def pack(self, kind, source, matrix=None, *, first=0, flags=0, columns=None):
        """Pack ``source``: rows of bytes, or plain numbers as their bits."""
        rows = len(source)
        columns = columns or columns_of(kind, source)
        matrix = matrix or self.packing(kind, rows, columns)
        self.run(
            instruction(
                Op.PACK,
                (rows, columns, first, KINDS[kind]),
                (source, matrix, codebook(kind)),
                flags=flags,
            )
        )
        return matrix

    def linear(
        self,
        x,
        matrix,
        *,
        bias=None,
        mode=Flag.X_EXACT,
        flags=0,
        columns=None,
        delta=None,
        norm=None,
        total=None,
        eps=1e-5,
    ):
        rows, k = x.shape
        wide = columns or matrix.struct.rows
        y = np.full((rows, wide), np.nan, np.float32)
        data = (x, matrix, bias, y, delta, norm, total)
        self.run(
            instruction(
                Op.LINEAR, (rows, k, wide, columns or 0), data, (eps,), mode | flags
            )
        )
        return y


LIBC = ctypes.CDLL(None)
LIBC.aligned_alloc.restype = ctypes.c_void_p
LIBC.aligned_alloc.argtypes = ctypes.c_size_t, ctypes.c_size_t
LIBC.free.argtypes = (ctypes.c_void_p,)


def aligned(size):
    """Zero bytes at a cache line, of which sanitizers know the bounds."""
    place = LIBC.aligned_alloc(64, -(-size // 64) * 64)
    memory = (ctypes.c_uint8 * size).from_address(place)
    ctypes.memset(place, 0, size)
    weakref.finalize(memory, LIBC.free, place)
    return np.frombuffer(memory, np.uint8)


def columns_of(kind, source):
    if kind in BLOCKS:
        elements, size = BLOCKS[kind]
        return source.shape[1] // size * elements
    return source.shape[1]


@dataclass
class Matrix:
    """A matrix struct and its memory."""

    struct: MatrixStruct
    memory: np.ndarray

    def __post_init__(self):
        self.struct.data = self.memory.ctypes.data


@dataclass
class Instruction:
    """An encoded instruction and its operands."""

    bytes: bytes
    operands: tuple


def address(item):
    if item is None:
        return 0
    if isinstance(item, Matrix):
        return ctypes.addressof(item.struct)
    assert item.flags.c_contiguous
    return item.ctypes.data


def instruction(opcode, dims=(), data=(), reals=(), flags=0):
    dims = (*dims, *[0] * (DIMS - len(dims)))
    places = [address(item) for item in data]
    places += [0] * (DATA - len(places))
    reals = (*reals, *[0.0] * (REALS - len(reals)))
    return Instruction(
        INSTRUCTION.pack(opcode, flags, *dims, *places, *reals), tuple(data)
    )


def f32(values):
    return np.ascontiguousarray(values, np.float32)


def i32(values):
    return np.ascontiguousarray(values, np.int32)


def bf16(values):
    return rounded(f32(values), "bfloat16")


def weights_of(kind, source, shape):
    """Packed rows as float64, by the decoder of the core."""
    return dequantize(HostArray(source, kind, shape)).astype(np.float64)


def random_packed(native, rng, kind, rows, columns, size=1.0):
    """A matrix of random blocks, and its weights as float64."""
    source = random_blocks(rng, kind, rows, columns, size)
    return native.pack(kind, source), weights_of(kind, source, (rows, columns))


def coded(x, group):
    """Rows rounded to int8 with a scale for each group, as float64.

    The last group may have fewer columns.
    """
    out = np.array(x, np.float64)
    for start in range(0, out.shape[1], group):
        part = out[:, start : start + group]
        scale = np.abs(part).max(-1, keepdims=True) / 127
        part[:] = np.rint(part / np.where(scale, scale, 1)) * scale
    return out


def excess(got, exact, close, dtype, factor=2.0):
    """Largest error relative to the tolerance; at most 1 is correct.

    The tolerance of ``inl.spec.tolerance``: twice the relative error of the body run
    with rounding (``close``; the largest over the rows) plus a constant.
    """
    got, exact, close = (np.asarray(a, np.float64) for a in (got, exact, close))
    assert got.shape == exact.shape
    width = exact.shape[-1]
    got, exact, close = (a.reshape(-1, width) for a in (got, exact, close))
    size = np.abs(exact).max(-1)
    errors = np.nan_to_num(np.abs(got - exact).max(-1), nan=np.inf)
    noise = np.max(np.abs(close - exact).max(-1) / np.where(size > 0, size, 1))
    allowed = (factor * noise + FLOOR[dtype] * EPSILON[dtype]) * size
    return float(np.max(np.where(errors > 0, errors / np.maximum(allowed, 1e-300), 0)))


def product_excess(got, x, weights, dtype, bias=None):
    """:func:`excess` of a product of ``x`` (already rounded to ``dtype``)."""
    shift = 0 if bias is None else bias
    exact = x.astype(np.float64) @ weights.T + shift
    close = f32(x) @ f32(weights).T + f32(shift)
    return excess(got, exact, rounded(f32(close), dtype), dtype)
