"""Time the native CPU kernels at the shapes of the default model.

    python bench/cpu_kernels.py [--isa avx512] [--threads 2] [--rows 1 8] [--cpu-time]

Each matrix is held in as many copies as a model has layers, so that it comes from
memory as in a step; "step" is all products of one, in their order. Rounds are
interleaved with a plain read of 128 MB by the same threads, whose speed is the ceiling;
medians. ``--cpu-time`` counts processor time instead, which means something on a
machine that others share (one thread only).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from inl.checkpoints.blocks.codebooks import codebook
from inl.checkpoints.blocks.dtypes import BLOCKS
from inl_cpu.abi import (
    DATA,
    DIMS,
    INSTRUCTION,
    ISAS,
    KINDS,
    REALS,
    Flag,
    MatrixStruct,
)
from inl_cpu.instructions import Opcode
from inl_cpu.library import open_library

LAYERS = 30
READ_BYTES = 1 << 27
ROUNDS = 5
SHAPES = (
    ("qkv", "q4_1", 960, 576),
    ("out", "q4_1", 576, 576),
    ("gate, up", "q4_1", 3072, 576),
    ("down", "q4_1", 576, 1536),
    ("head", "q8_0", 49152, 576),
)
MODES = {
    "exact": Flag.X_EXACT,
    "int16": Flag.X_INT16,
    "int8": Flag.X_INT8,
    "free": Flag.X_INT16 | Flag.BATCH_VARIANT,
}


class Program(NamedTuple):
    """Instructions and what they point to; how many are timed as one.

    Bytes of weights that one of ``count`` such pieces reads, and its multiplications.
    """

    name: str
    instructions: bytes
    held: tuple
    nbytes: int
    count: int
    macs: int = 0

    @property
    def length(self):
        return len(self.instructions) // INSTRUCTION.size


def instruction(opcode, dims, pointers, flags=0):
    dims = (*dims, *[0] * (DIMS - len(dims)))
    pointers = (*pointers, *[0] * (DATA - len(pointers)))
    return INSTRUCTION.pack(opcode, flags, *dims, *pointers, *[0.0] * REALS)


class Bench:
    """A pool, the memory that its programs use, and a clock."""

    def __init__(self, isa, threads, clock, library=None):
        self.library = library or open_library().library
        if self.library is None:
            sys.exit(open_library().reason)
        self.pool = self.library.inl_open(threads, ISAS.index(isa))
        if not self.pool:
            sys.exit(f"this machine runs no {threads} threads of {isa}")
        self.clock = clock

    def run(self, program):
        refused = self.library.inl_run(self.pool, program.instructions, program.length)
        assert not refused, self.library.inl_refusal(self.pool)

    def timed(self, program):
        start = self.clock()
        self.run(program)
        return (self.clock() - start) / program.count

    def reading(self):
        source, total = np.ones(READ_BYTES, np.uint8), np.zeros(1, np.uint64)
        place = source.ctypes.data, total.ctypes.data
        one = instruction(Opcode.READ, (READ_BYTES,), place)
        return Program("read", one, (source, total), READ_BYTES, 1)

    def matrices(self, kind, rows, columns, count):
        """Copies of one matrix of random codes, in one piece of memory."""
        struct = MatrixStruct(rows=rows, columns=columns)
        self.library.inl_packing(KINDS[kind], ctypes.byref(struct))
        size = self.library.inl_matrix_bytes(ctypes.byref(struct))
        size = -(-size // 64) * 64
        memory = np.zeros(size * count + 64, np.uint8)
        structs = (MatrixStruct * count)(*[struct] * count)
        elements, nbytes = BLOCKS[kind]
        rng = np.random.default_rng(0)
        source = rng.integers(0, 64, (rows, columns // elements, nbytes), np.uint8)
        if kind == "mxfp4":  # small exponents give subnormal numbers, which are slow
            source[..., 0] += 96
        book = codebook(kind)
        third = () if book is None else (book.ctypes.data,)
        for index, one in enumerate(structs):
            one.data = memory.ctypes.data + -memory.ctypes.data % 64 + index * size
            pointers = source.ctypes.data, ctypes.addressof(one), *third
            pack = instruction(Opcode.PACK, (rows, columns, 0, KINDS[kind]), pointers)
            self.run(Program("pack", pack, (), 0, 1))
        return structs, memory, size

    def products(self, shape, rows):
        """For each copy of a matrix, its product as a function of the flags."""
        name, kind, outputs, columns = shape
        count = 1 if name == "head" else LAYERS
        structs, memory, size = self.matrices(kind, outputs, columns, count)
        x = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
        y = np.empty((rows, outputs), np.float32)

        def product(one, flags):
            place = x.ctypes.data, ctypes.addressof(one), 0, y.ctypes.data
            return instruction(Opcode.LINEAR, (rows, columns, outputs), place, flags)

        held = structs, memory, x, y
        return [partial(product, one) for one in structs], held, size

    def programs(self, rows):
        """Every shape in every mode, shape by shape, and then the whole step."""
        parts = []
        for shape in SHAPES:
            products, held, size = self.products(shape, rows)
            macs = rows * shape[2] * shape[3]
            parts.append((products, held, size, macs))
            for mode, flags in MODES.items():
                code = b"".join(product(flags) for product in products)
                name = f"{shape[0]:9s} {shape[1]} {mode:5s}"
                yield Program(name, code, held, size, len(products), macs)
        order = [p[0][n] for n in range(LAYERS) for p in parts if n < len(p[0])]
        # The head has one copy, and is the last.
        order.append(order.pop(len(parts) - 1))
        size = sum(len(p[0]) * p[2] for p in parts)
        macs = sum(len(p[0]) * p[3] for p in parts)
        for mode, flags in MODES.items():
            code = b"".join(product(flags) for product in order)
            yield Program(
                f"step      all  {mode:5s}", code, tuple(parts), size, 1, macs
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    best = ISAS[open_library().library.inl_best_isa()] if open_library().library else ""
    parser.add_argument("--isa", choices=ISAS, default=best)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    if options.cpu_time and options.threads > 1:
        parser.error("--cpu-time: found more than one thread, accepts --threads 1")
    clock = time.process_time if options.cpu_time else time.perf_counter
    bench = Bench(options.isa, options.threads, clock)
    reading = bench.reading()
    print(f"{options.isa}, {options.threads} threads, medians of {ROUNDS} rounds")
    print("rows  matrix    kind mode         us    GB/s  of read   GMAC/s")
    for rows in options.rows:
        every = bench.programs(rows)
        while programs := list(islice(every, len(MODES))):
            times = {program.name: [] for program in [*programs, reading]}
            for _ in range(ROUNDS):
                for program in programs:
                    # Read first, so that none finds what the one before has left.
                    times["read"].append(bench.timed(reading))
                    times[program.name].append(bench.timed(program))
            ceiling = READ_BYTES / statistics.median(times["read"])
            for program in programs:
                took = statistics.median(times[program.name])
                speed, macs = program.nbytes / took, program.macs / took
                print(
                    f"{rows:4d}  {program.name} {took * 1e6:9.1f} {speed / 1e9:7.1f} "
                    f"{speed / ceiling:7.0%} {macs / 1e9:8.0f}"
                )


if __name__ == "__main__":
    main()
