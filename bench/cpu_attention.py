"""Time attention alone on the CPU, of several builds of the library side by side.

    python bench/cpu_attention.py [--library OTHER.so] [--isa avx512] [--threads 1]

One layer of the default model's shape (9 heads, 3 of keys, width 64, blocks of 16),
with a cache for each of several layers, so that it comes from memory as in a step.
Rounds are interleaved; the least processor time of all threads. ``python
build_native.py --output OTHER.so`` in a checkout of another version makes a build to
compare with; one that does not know int8 takes float32 for it.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import numpy as np

from inl_cpu.abi import INSTRUCTION, ISAS, Flag
from inl_cpu.instructions import Opcode
from inl_cpu.library import LIBRARY_PATH, declare_signatures
from inl_cpu.memory import aligned

HEADS, KV_HEADS, WIDTH, BLOCK = 9, 3, 64, 16
ROUNDS = 7
CACHES = {"float32": Flag.X_EXACT, "bfloat16": Flag.KV_BF16, "int8": Flag.KV_INT8}
CASES = {
    "prefill of 512": (1, 0, 512, 6),
    "1 row of 128": (1, 128, 1, 30),
    "1 row of 2,000": (1, 2000, 1, 30),
    "1 row of 8,000": (1, 8000, 1, 10),
    "8 rows of 2,000": (8, 2000, 1, 10),
    "32 rows of 128": (32, 128, 1, 30),
}
"""Rows, cached tokens, new tokens of each row, layers."""


def program(library, flags, case):
    """Instructions of every layer, and what they point to."""
    rows, cached, count, layers = case
    tokens, blocks = rows * count, -(-(cached + count) // BLOCK)
    positions = np.tile(np.arange(cached, cached + count, dtype=np.int32), rows)
    row = np.repeat(np.arange(rows, dtype=np.int32), count)
    table = np.arange(1, 1 + rows * blocks, dtype=np.int32).reshape(rows, blocks)
    writes = table[row, positions // BLOCK] * BLOCK + positions % BLOCK
    starts = np.arange(rows + 1, dtype=np.int32) * count
    lengths = np.full(rows, cached + count, np.int32)
    wide = (HEADS + 2 * KV_HEADS) * WIDTH
    qkv = np.random.default_rng(0).standard_normal((tokens, wide)).astype(np.float32)
    turns = np.ones((2, tokens, WIDTH // 2), np.float32)
    y = np.empty((tokens, HEADS * WIDTH), np.float32)
    size = library.inl_cache_bytes(rows * blocks + 1, BLOCK, KV_HEADS, WIDTH, flags)
    if size < 0:
        return None
    caches = [(aligned(size), aligned(size)) for _ in range(layers)]
    dims = (tokens, HEADS, KV_HEADS, WIDTH, BLOCK, rows, blocks, 0, wide, wide)
    q = qkv.ctypes.data
    before = (q, q + 4 * HEADS * WIDTH, q + 4 * (HEADS + KV_HEADS) * WIDTH)
    after = [a.ctypes.data for a in (y, positions, row, starts, lengths, table, writes)]
    after += [turn.ctypes.data for turn in turns]
    if rows == count == 1:
        flags |= Flag.ONE_TOKEN_ROWS
    packed = b""
    for k, v in caches:
        k[:], v[:] = 1, 1
        places = (*before, k.ctypes.data, v.ctypes.data, *after)
        places = (*places, *[0] * (20 - len(places)))
        packed += INSTRUCTION.pack(
            Opcode.ATTENTION, flags, *dims, *places, WIDTH**-0.5, 0, 0, 0
        )
    held = caches, positions, row, table, writes, starts, lengths, qkv, turns, y
    return packed, held


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, action="append", default=[])
    parser.add_argument("--isa", choices=ISAS, default="avx512")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    pools = []
    for place in (LIBRARY_PATH, *given.library):
        library = ctypes.CDLL(str(place))
        declare_signatures(library)
        pool = library.inl_open(given.threads, ISAS.index(given.isa))
        if not pool:
            parser.error(f"{place} runs no {given.threads} threads of {given.isa}")
        pools.append((place, library, pool))
    for name, case in CASES.items():
        rows, cached, count, layers = case
        products = 2 * HEADS * WIDTH * rows
        products *= sum(range(cached + 1, cached + count + 1))
        for kind, flags in CACHES.items():
            known = [program(library, flags, case) for _, library, _ in pools]
            least = [float("inf")] * len(pools)
            for _ in range(ROUNDS):
                for index, (_, library, pool) in enumerate(pools):
                    began = time.process_time()
                    refused = library.inl_run(pool, known[index][0], layers)
                    spent = (time.process_time() - began) / layers
                    assert not refused, library.inl_refusal(pool)
                    least[index] = min(least[index], spent)
            cells = (
                f"{1e6 * t:9.0f} us {products / t / 1e9:6.1f} GMAC/s" for t in least
            )
            print(f"{given.isa} {name:16s} {kind:9s}", *cells, flush=True)


if __name__ == "__main__":
    main()
