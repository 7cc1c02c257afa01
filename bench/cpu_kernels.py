"""Time the native CPU kernels at the shapes of the default model.

    python bench/cpu_kernels.py [--isa avx512] [--threads 2] [--rows 1 8] [--cpu-time]

Each matrix is held in as many copies as a model has layers, so that it comes from
memory as in a step. Rounds are interleaved with a plain read of 128 MB by the same
threads, whose speed is the ceiling; medians. ``--cpu-time`` counts processor time
instead, which means something on a machine that others share (one thread only).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from typing import NamedTuple

import numpy as np

from inl.weights.quant import BLOCKS
from inl_cpu.abi import (
    DATA,
    DIMS,
    INSTRUCTION,
    ISAS,
    KINDS,
    REALS,
    Flag,
    MatrixStruct,
    Opcode,
)
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
    "free": Flag.X_INT16 | Flag.ANY_BITS,
}


class Program(NamedTuple):
    """Instructions, what they point to, and the bytes that one of them reads."""

    name: str
    instructions: bytes
    held: tuple
    nbytes: int
    count: int


def instruction(opcode, dims, pointers, flags=0):
    dims = (*dims, *[0] * (DIMS - len(dims)))
    pointers = (*pointers, *[0] * (DATA - len(pointers)))
    return INSTRUCTION.pack(opcode, flags, *dims, *pointers, *[0.0] * REALS)


class Bench:
    """A pool, the memory that its programs use, and a clock."""

    def __init__(self, isa, threads, clock):
        self.library = open_library().library
        if self.library is None:
            sys.exit(open_library().reason)
        self.pool = self.library.inl_open(threads, ISAS.index(isa))
        if not self.pool:
            sys.exit(f"this machine runs no {threads} threads of {isa}")
        self.clock = clock

    def run(self, program):
        refused = self.library.inl_run(self.pool, program.instructions, program.count)
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
        source = rng.integers(0, 64, (rows, columns // elements * nbytes), np.uint8)
        for index, one in enumerate(structs):
            one.data = memory.ctypes.data + -memory.ctypes.data % 64 + index * size
            pointers = source.ctypes.data, ctypes.addressof(one)
            pack = instruction(Opcode.PACK, (rows, columns, 0, KINDS[kind]), pointers)
            self.run(Program("pack", pack, (), 0, 1))
        return structs, memory, size

    def linear(self, shape, rows):
        name, kind, outputs, columns = shape
        count = 1 if name == "head" else LAYERS
        structs, memory, size = self.matrices(kind, outputs, columns, count)
        x = np.random.default_rng(1).standard_normal((rows, columns)).astype(np.float32)
        y = np.empty((rows, outputs), np.float32)
        for mode, flags in MODES.items():
            dims = rows, columns, outputs
            program = b"".join(
                instruction(
                    Opcode.LINEAR,
                    dims,
                    (x.ctypes.data, ctypes.addressof(one), 0, y.ctypes.data),
                    flags,
                )
                for one in structs
            )
            held = structs, memory, x, y
            yield Program(f"{name:9s} {kind} {mode:5s}", program, held, size, count)


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
        for shape in SHAPES:
            programs = list(bench.linear(shape, rows))
            times = {program.name: [] for program in [*programs, reading]}
            for _ in range(ROUNDS):
                for program in programs:
                    # Read first, so that none finds what the one before has left.
                    times["read"].append(bench.timed(reading))
                    times[program.name].append(bench.timed(program))
            ceiling = READ_BYTES / statistics.median(times["read"])
            for program in programs:
                took = statistics.median(times[program.name])
                speed, macs = program.nbytes / took, rows * shape[2] * shape[3] / took
                print(
                    f"{rows:4d}  {program.name} {took * 1e6:9.1f} {speed / 1e9:7.1f} "
                    f"{speed / ceiling:7.0%} {macs / 1e9:8.0f}"
                )


if __name__ == "__main__":
    main()
