"""Time products on the CPU with weights of each GGUF kind.

    python bench/cpu_formats.py [--kinds q4_k q6_k] [--rows 1 8 64] [--beside LIBRARY]

One thread, in processor time, which means something on a machine that others share;
inputs in int8, the default. Each matrix is held in several copies, so that up to 64
rows read their weights from memory. Prints the bits of a packed weight, the least time
of a product over interleaved rounds, and what that reads and multiplies per second.
``--beside`` names the native library of another version: every round runs both, and the
last two columns are the ratio of their times (over 1: this version is faster) and
whether all results are equal bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import numpy as np
from cpu_kernels import Bench, Program, instruction

from inl.checkpoints.blocks.dtypes import BLOCKS
from inl_cpu.abi import ISAS, KINDS, Flag
from inl_cpu.instructions import Opcode
from inl_cpu.library import declare_signatures, open_library

ROUNDS = 15
OUTPUTS, COLUMNS = 4096, 1536
MEMORY_ROWS = 64
"""Up to so many rows read their weights from memory."""
KIND_NAMES = [kind for kind in KINDS if kind in BLOCKS]


def opened(path):
    """A library of another version; its structs must be those of this one."""
    library = ctypes.CDLL(str(path.resolve()))
    declare_signatures(library)
    return library


def product(bench, kind, rows):
    """A program that multiplies every copy of a matrix, and its result."""
    copies = 16 if rows <= MEMORY_ROWS else 2
    structs, memory, size = bench.matrices(kind, OUTPUTS, COLUMNS, copies)
    x = np.random.default_rng(1).standard_normal((rows, COLUMNS)).astype(np.float32)
    y = np.empty((rows, OUTPUTS), np.float32)
    code = b"".join(
        instruction(
            Opcode.LINEAR,
            (rows, COLUMNS, OUTPUTS),
            (x.ctypes.data, ctypes.addressof(one), 0, y.ctypes.data),
            Flag.X_INT8,
        )
        for one in structs
    )
    held = structs, memory, x
    return Program(kind, code, held, size, copies, rows * OUTPUTS * COLUMNS), y


def compare(benches, kind, rows):
    """Print one row: this version, and the ratio of another one's time to its."""
    made = [product(bench, kind, rows) for bench in benches]
    times = [[] for _ in benches]
    for _ in range(ROUNDS):
        for index, (bench, (program, _)) in enumerate(zip(benches, made, strict=True)):
            times[index].append(bench.timed(program))
    program, took = made[0][0], min(times[0])
    row = (
        f"{kind:8s} {rows:4d} {8 * program.nbytes / OUTPUTS / COLUMNS:6.3f} "
        f"{took * 1e6:9.1f} {program.nbytes / took / 1e9:7.1f} "
        f"{program.macs / took / 1e9:7.1f}"
    )
    for (_, y), other in zip(made[1:], times[1:], strict=True):
        row += f" {min(other) / took:7.2f} {np.array_equal(y, made[0][1])!s:>6s}"
    print(row, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    library = open_library().library
    best = ISAS[library.inl_best_isa()] if library else ""
    parser.add_argument("--isa", choices=ISAS, default=best)
    parser.add_argument("--kinds", nargs="+", choices=KIND_NAMES, default=KIND_NAMES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--beside", type=Path, help="native library to compare with")
    options = parser.parse_args()
    libraries = [None] + ([opened(options.beside)] if options.beside else [])
    benches = [Bench(options.isa, 1, time.process_time, each) for each in libraries]
    print(f"{options.isa}, {OUTPUTS}x{COLUMNS}, the least of {ROUNDS} rounds")
    print("kind     rows   bits        us    GB/s  GMAC/s  before  equal")
    for kind in options.kinds:
        for rows in options.rows:
            compare(benches, kind, rows)


if __name__ == "__main__":
    main()
