"""The thread pool: concurrent calls, contention, forks and shutdown."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from native_harness import Native, Op, Refused, instruction

from waiting import until


@pytest.fixture
def pool(lib):
    opened = Native(lib, "scalar", 4)
    yield opened
    opened.close()


def chain(steps, count=50000):
    """Each step reads the result of the previous one, so order errors are visible."""
    x = np.zeros(count, np.float32)
    return x, [instruction(Op.SCALE, (count,), (x, x), (1.0, 1.0))] * steps


def test_instructions_run_in_order(pool):
    x, program = chain(500)
    pool.run(*program)
    assert (x == 500).all()


def test_concurrent_calls_are_serialized(pool):
    works = [chain(60) for _ in range(6)]
    threads = [threading.Thread(target=pool.run, args=work[1]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert all((x == 60).all() for x, _ in works)


def test_each_thread_gets_the_reason_of_its_own_program(pool):
    """While others run valid programs and are refused for other reasons."""
    x, program = chain(2)
    wrong = []

    def refused(opcode):
        for _ in range(300):
            try:
                pool.run(instruction(opcode))
            except Refused as reason:
                if f"opcode {opcode}: unknown" not in str(reason):
                    wrong.append(str(reason))

    threads = [threading.Thread(target=refused, args=[n]) for n in (77, -8, 2**30)]
    for thread in threads:
        thread.start()
    for count in range(150):
        pool.run(*program)
        if count % 3 == 0:  # let threads fall asleep
            time.sleep(0.0004)
    for thread in threads:
        thread.join(300)
    assert wrong == []
    assert (x == 300).all()


def test_pools_open_and_close(lib):
    for _ in range(20):
        opened = Native(lib, "scalar", 3)
        x, program = chain(3, 20000)
        opened.run(*program)
        opened.close()
        assert (x == 3).all()


def test_idle_threads_sleep(pool):
    _, program = chain(1)
    pool.run(*program)

    def are_asleep():
        before = time.process_time()
        time.sleep(0.3)
        return time.process_time() - before < 0.05

    # Other threads of this process may have work to finish.
    until(are_asleep)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_computes_alone(place):
    """In a subprocess, because pytest's threads do not survive a fork."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from native_harness import *\n"
        "native = Native(library(sys.argv[2]), 'scalar', 4)\n"
        "x = np.zeros(100000, np.float32)\n"
        "step = instruction(Op.SCALE, (x.size,), (x, x), (1.0, 1.0))\n"
        "native.run(step)\n"
        "child = os.fork()\n"
        "native.run(*[step] * 50)\n"
        "native.close()\n"
        "assert (x == 51).all()\n"
        "if child == 0: os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here, str(place)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "7\n", done.stderr


CROWDED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from native_harness import *
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
native = Native(library(sys.argv[2]), "scalar", 3)
# Two tasks of long chunks, in which threads are preempted, then tasks of one chunk.
rows = np.ones((32, 1 << 15), np.float32)
matrix = native.packing("float32", *rows.shape)
dims = *rows.shape, 0, KINDS["float32"]
pack = instruction(Op.PACK, dims, (rows, matrix))
x, total = np.ones(1000, np.uint64), np.zeros(1, np.uint64)
read = instruction(Op.READ, (x.nbytes,), (x, total))
start = time.monotonic()
while time.monotonic() - start < 5:
    total[0] = 0
    native.run(*[pack, pack, read] * 3)
    assert total[0] == x.size, total
print("done")
"""


@pytest.mark.full
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system pins no threads"
)
def test_no_wake_up_is_lost_when_threads_are_preempted(place):
    """More busy threads than cores: a thread that backs off must announce a task of one
    chunk that it published without waking others."""
    here, cores = str(Path(__file__).parent), sorted(os.sched_getaffinity(0))
    competitors = [busy_on(core) for core in cores[:2]]
    try:
        done = subprocess.run(
            [sys.executable, "-c", CROWDED, here, str(place)],
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        for competitor in competitors:
            competitor.kill()
            competitor.wait()
    assert done.stdout == "done\n", done.stderr


def busy_on(core):
    code = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    return subprocess.Popen([sys.executable, "-c", code])
