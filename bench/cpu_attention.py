"""Time attention alone on the CPU, of several builds of the library side by side.

    python bench/cpu_attention.py [--library OTHER.so] [--isa avx512] [--threads 1]
                                  [--shape 14 2 64] [--contexts 4000 16000 32000]

One layer of the default model's shape (9 heads, 3 of keys, width 64, blocks of 16) or
``--shape``, with a cache for each of several layers, so that it comes from memory as in
a step. ``--contexts`` times one decoding row of each length instead, beside a plain
read of as many bytes by the same threads.
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

BLOCK = 16
ROUNDS = 7
READ_BYTES = 1 << 28
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


def program(library, flags, case, shape):
    """Instructions of all layers, what they point to, and the bytes of their caches."""
    rows, cached, count, layers = case
    heads, kv_heads, width = shape
    tokens, blocks = rows * count, -(-(cached + count) // BLOCK)
    positions = np.tile(np.arange(cached, cached + count, dtype=np.int32), rows)
    row = np.repeat(np.arange(rows, dtype=np.int32), count)
    table = np.arange(1, 1 + rows * blocks, dtype=np.int32).reshape(rows, blocks)
    writes = table[row, positions // BLOCK] * BLOCK + positions % BLOCK
    starts = np.arange(rows + 1, dtype=np.int32) * count
    lengths = np.full(rows, cached + count, np.int32)
    wide = (heads + 2 * kv_heads) * width
    qkv = np.random.default_rng(0).standard_normal((tokens, wide)).astype(np.float32)
    turns = np.ones((2, tokens, width // 2), np.float32)
    y = np.empty((tokens, heads * width), np.float32)
    size = library.inl_cache_bytes(rows * blocks + 1, BLOCK, kv_heads, width, flags)
    if size < 0:
        return None
    caches = [(aligned(size), aligned(size)) for _ in range(layers)]
    dims = (tokens, heads, kv_heads, width, BLOCK, rows, blocks, 0, wide, wide)
    q = qkv.ctypes.data
    before = (q, q + 4 * heads * width, q + 4 * (heads + kv_heads) * width)
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
            Opcode.ATTENTION, flags, *dims, *places, width**-0.5, 0, 0, 0
        )
    held = caches, positions, row, table, writes, starts, lengths, qkv, turns, y
    return packed, held, 2 * size * layers


def reading(nbytes):
    """A read of so many bytes by all threads, and what it points to."""
    source, total = np.ones(min(nbytes, READ_BYTES), np.uint8), np.zeros(1, np.uint64)
    dims = (source.size, *[0] * 9)
    places = (source.ctypes.data, total.ctypes.data, *[0] * 18)
    return INSTRUCTION.pack(Opcode.READ, 0, *dims, *places, 0, 0, 0, 0), (source, total)


def seconds(library, pool, packed, count):
    """Processor time of all threads."""
    began = time.process_time()
    refused = library.inl_run(pool, packed, count)
    assert not refused, library.inl_refusal(pool)
    return time.process_time() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, action="append", default=[])
    parser.add_argument("--isa", choices=ISAS, default="avx512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", type=int, nargs=3, default=(9, 3, 64))
    parser.add_argument("--contexts", type=int, nargs="*", default=[])
    parser.add_argument("--kinds", choices=CACHES, nargs="+", default=list(CACHES))
    given = parser.parse_args()
    heads, _, width = given.shape
    pools = []
    for place in (LIBRARY_PATH, *given.library):
        library = ctypes.CDLL(str(place))
        declare_signatures(library)
        pool = library.inl_open(given.threads, ISAS.index(given.isa))
        if not pool:
            parser.error(f"{place} runs no {given.threads} threads of {given.isa}")
        pools.append((library, pool))
    cases = {f"1 row of {n:,}": (1, n, 1, max(2, 2**17 // n)) for n in given.contexts}
    for name, case in (cases or CASES).items():
        rows, cached, count, layers = case
        products = 2 * heads * width * rows
        products *= sum(range(cached + 1, cached + count + 1))
        for kind in given.kinds:
            known = [program(lib, CACHES[kind], case, given.shape) for lib, _ in pools]
            read, held = reading(known[0][2])
            least = [float("inf")] * (1 + len(pools))
            for _ in range(ROUNDS):
                spent = [seconds(*pools[0], read, 1) / held[0].size]
                for pool, (packed, _, _) in zip(pools, known, strict=True):
                    spent.append(seconds(*pool, packed, layers) / layers)
                least = [min(pair) for pair in zip(least, spent, strict=True)]
            nbytes = known[0][2] / layers
            cells = (
                f"{1e6 * t:9.0f} us {products / t / 1e9:6.1f} GMAC/s "
                f"{least[0] * nbytes / t:5.2f} of read"
                for t in least[1:]
            )
            print(f"{given.isa} {name:16s} {kind:9s}", *cells, flush=True)


if __name__ == "__main__":
    main()
