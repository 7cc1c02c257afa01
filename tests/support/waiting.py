"""Waits until a condition of another thread holds."""

from __future__ import annotations

import time


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
