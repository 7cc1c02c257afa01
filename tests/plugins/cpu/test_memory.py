"""Memory that is committed when it is written, and scratch that is freed anywhere."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from inl_cpu.memory import ALIGNMENT, BufferPlanner, Scratch, address, sparse_zeros
from interrupts import Injector

STATM = Path("/proc/self/statm")
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident():
    return int(STATM.read_text().split()[1]) * PAGE


@pytest.mark.skipif(not STATM.exists(), reason="needs Linux's /proc")
def test_a_byte_commits_a_small_page():
    parts = [sparse_zeros(16 << 20) for _ in range(16)]
    before = resident()
    for part in parts:
        part[7 << 20] = 1
    assert resident() - before < 4 << 20
    # The measurement detects a part that is written.
    parts[0][:] = 1
    assert resident() - before > 12 << 20


def test_zero_aligned_and_of_the_requested_size():
    part = sparse_zeros(12_345)
    assert part.nbytes == 12_345
    assert not part.any()
    assert address(part) % ALIGNMENT == 0
    part[:] = 255
    assert sparse_zeros(0).nbytes == 0


def test_an_impossible_size_is_a_memory_error():
    with pytest.raises(MemoryError, match="bytes"):
        sparse_zeros(1 << 62)


SHAPE = (100, 7)


def test_blocks_are_reused_once_no_tensor_has_them():
    planner = BufferPlanner(Scratch())
    first, second = (planner.allocate(SHAPE, np.float32) for _ in range(2))
    view, place = first[3:], address(first)
    del first
    assert address(planner.allocate(SHAPE, np.float32)) not in (place, address(second))
    assert len(planner.blocks) == 3
    del view
    again = planner.allocate(SHAPE, np.float32)
    assert address(again) == place
    assert len(planner.blocks) == 3


def test_no_python_code_runs_when_a_tensor_is_freed():
    """An exception in it, as Ctrl-C raises it anywhere, would be swallowed."""
    planner = BufferPlanner(Scratch())
    array = planner.allocate(SHAPE, np.float32)
    with Injector(1, events="opcodes", packages=("inl_cpu.",)) as injector:
        del array
    assert injector.count == 0
    planner.allocate(SHAPE, np.float32)
    assert len(planner.blocks) == 1


@pytest.mark.parametrize("events", ["lines", "opcodes"])
def test_an_interrupt_at_any_instruction_is_raised_and_gives_no_block_twice(events):
    def work():
        for _ in range(2):
            array = planner.allocate(SHAPE, np.float32)
            del array

    planner, at = BufferPlanner(Scratch()), 0
    while True:
        at += 1
        injector = Injector(at, events=events, packages=("inl_cpu.",))
        try:
            with injector:
                work()
        except KeyboardInterrupt:
            """Right: it reaches the caller."""
        else:
            assert injector.place is None, "swallowed"
            break
        held = [planner.allocate(SHAPE, np.float32) for _ in range(4)]
        assert len({*map(address, held)}) == 4
        del held
    assert at > 20
