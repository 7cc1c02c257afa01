"""How fast memory can be read here; runs where NumPy is.

python bandwidth.py THREADS: prints bytes a second, the best of a few tries.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SIZE = 1 << 30
"""Bytes to read, over what a virtual machine may use of a big host's cache."""
TRIES = 5


def read_rate(threads: int) -> float:
    """Read a buffer with so many threads."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    buffer = np.ones(min(SIZE, free // 4) // 8, np.int64)
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        best = float("inf")
        for _ in range(TRIES + 1):
            began = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = min(best, time.perf_counter() - began)
    return buffer.nbytes / best


if __name__ == "__main__":
    print(json.dumps(max(read_rate(1), read_rate(int(sys.argv[1])))))
