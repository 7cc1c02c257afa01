"""Waits until a condition of another thread holds."""

from __future__ import annotations

import time
from pathlib import Path


def until(condition, seconds=300):
    """Wait until a condition is true; fails after some seconds.

    It sleeps longer than the condition takes to compute, which may hold the
    interpreter's lock all the while.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline
        time.sleep(max(0.01, 4 * (now - began)))


def is_running(pid):
    """Whether a process runs; reads ``/proc``."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
