"""sparse_zeros commits only the pages that are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inl_cpu.memory import ALIGNMENT, address, sparse_zeros

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
