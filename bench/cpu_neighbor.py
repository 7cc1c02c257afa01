"""A pool of two threads beside a busy process on one of their two cores.

    python bench/cpu_neighbor.py

Prints products per second of one thread and of two. Threads that spin at barriers
would make two of them ten times as slow as one. Exit code 1: two threads reach less
than 0.6 of one thread's speed. Uses the native harness of the tests.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parents[1]
sys.path.append(str(HERE / "tests" / "plugins" / "cpu" / "native"))

from native_blocks import random_blocks  # noqa: E402
from native_harness import Native, Op, f32, instruction, library  # noqa: E402

LIBRARY = HERE / "plugins" / "inl-cpu" / "src" / "inl_cpu" / "native" / "libinl.so"
ROUNDS, SECONDS, LEAST = 9, 0.15, 0.6


def rate(pool: Any, step: Any) -> float:
    """Calls per second."""
    began, runs = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        pool.run(*[step] * 50)
        runs += 50
    return runs / (time.perf_counter() - began)


def main() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("found 1 core; needs 2")
    os.sched_setaffinity(0, cores)
    rng = np.random.default_rng(5)
    pools = [Native(library(LIBRARY), "scalar", threads) for threads in (1, 2)]
    matrix = pools[0].pack("q4_1", random_blocks(rng, "q4_1", 512, 512))
    x, y = f32(rng.standard_normal((1, 512))), np.empty((1, 512), np.float32)
    step = instruction(Op.LINEAR, (1, 512, 512), (x, matrix, None, y))
    busy = f"import os; os.sched_setaffinity(0, [{cores[1]}])\nwhile True: pass"
    neighbor = subprocess.Popen([sys.executable, "-c", busy])
    try:
        rounds = [[rate(pool, step) for pool in pools] for _ in range(ROUNDS)]
    finally:
        neighbor.kill()
        neighbor.wait()
    one, two = (statistics.median(each) for each in zip(*rounds, strict=True))
    print(
        f"products a second beside a busy core: 1 thread {one:.0f}, 2 threads {two:.0f}"
    )
    sys.exit(two < LEAST * one)


if __name__ == "__main__":
    main()
