"""Readers of steps: a bounded share of the loop's time, and no step unread."""

from __future__ import annotations

import asyncio
import time

from inl.serve.wakeups import Steps


class Reader:
    """Reads a counter of steps, for some seconds of processor time."""

    def __init__(self, seconds):
        self.steps = self.seen = self.calls = 0
        self._seconds = seconds

    def flush(self):
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            pass
        self.seen = self.steps
        self.calls += 1


async def read(seconds, steps, pause):
    """Read some steps; returns the reader, and the time of all steps."""
    loop = asyncio.get_running_loop()
    reader, wakeups = Reader(seconds), Steps(loop)
    wakeups.add(reader)
    began = loop.time()
    for _ in range(steps):
        reader.steps += 1
        wakeups.wake()
        await asyncio.sleep(pause)
    taken = loop.time() - began
    for _ in range(1000):
        if reader.seen == steps:
            break
        await asyncio.sleep(0.01)
    return reader, taken


def test_slow_readers_read_several_steps_together():
    reader, taken = asyncio.run(read(0.002, 100, 0.001))
    assert reader.seen == 100, "every step was read"
    # A reading of 2 ms is followed by 18 ms in which there is none.
    assert reader.calls <= taken / 0.018 + 2


def test_fast_readers_read_each_step():
    reader, _ = asyncio.run(read(0.0, 20, 0.02))
    assert reader.seen == 20
    # A collection of garbage in a reading takes the time of some.
    assert reader.calls >= 15
