"""Readers of steps: a bounded share of the loop's time, and no step unread."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from types import SimpleNamespace

import pytest

from inl.serve import wakeups
from inl.serve.wakeups import LONGEST_WAIT, SHARE, Steps


class Clock:
    """An event loop's methods for :class:`Steps`, and time that only a test spends."""

    def __init__(self):
        self.now = 0.0
        self._calls, self._numbers = [], itertools.count()

    def time(self):
        return self.now

    def call_at(self, when, call):
        heapq.heappush(self._calls, (when, next(self._numbers), call))

    def call_soon_threadsafe(self, call):
        self.call_at(self.now, call)

    def run(self):
        """Run all calls, and those that they make."""
        while self._calls:
            when, _, call = heapq.heappop(self._calls)
            self.now = max(self.now, when)
            call()


class Reader:
    """Reads a counter of steps; each reading takes some seconds."""

    def __init__(self, clock, seconds):
        self.steps = self.calls = 0
        self.taken = self.latest = 0.0
        self.waits = []
        """Seconds from the end of a step to the beginning of its reading."""
        self._clock, self._seconds = clock, seconds
        self._unread = []

    def step(self):
        """Count a step that ends now."""
        self.steps += 1
        self._unread.append(self._clock.now)

    def flush(self):
        now = self._clock.now
        self.waits += [now - ended for ended in self._unread]
        self._unread.clear()
        self.calls += 1
        self.taken += self._seconds
        self._clock.now = self.latest = now + self._seconds


def read(monkeypatch, seconds, steps, pause):
    """Return the reader of some steps, a pause apart."""
    clock = Clock()
    monkeypatch.setattr(wakeups, "time", SimpleNamespace(thread_time=clock.time))
    reader, readers = Reader(clock, seconds), Steps(clock)
    readers.add(reader)

    def step():
        reader.step()
        readers.wake()

    for at in range(steps):
        clock.call_at(at * pause, step)
    clock.run()
    assert len(reader.waits) == steps, "every step was read"
    return reader


@pytest.mark.parametrize("seconds", [0.0005, 0.001, 0.002])
def test_slow_readers_take_a_share_of_the_time(monkeypatch, seconds):
    reader = read(monkeypatch, seconds, 1000, 0.001)
    rest = min(seconds / SHARE, LONGEST_WAIT + seconds)
    assert reader.taken <= seconds * (reader.latest / rest + 1)
    assert reader.taken >= seconds * (reader.latest / rest - 2), "no longer than needed"


def test_no_step_waits_longer_than_the_longest_wait(monkeypatch):
    reader = read(monkeypatch, 0.04, 1000, 0.001)
    # A step that ends while steps are read waits for the end of the reading too.
    assert LONGEST_WAIT <= max(reader.waits) <= LONGEST_WAIT + 0.04 + 1e-9


def test_readers_that_take_no_time_read_each_step(monkeypatch):
    reader = read(monkeypatch, 0.0, 20, 0.001)
    assert reader.calls == reader.steps == 20
    assert {*reader.waits} == {0.0}


class Counter:
    """Counts readings."""

    def __init__(self):
        self.calls, self.was_called = 0, asyncio.Event()

    def flush(self):
        self.calls += 1
        self.was_called.set()


def test_fast_readers_read_each_step():
    """On an event loop, woken from another thread; a step ends once one was read."""

    async def run():
        readers = Steps(asyncio.get_running_loop())
        counter = Counter()
        readers.add(counter)
        for step in range(1, 21):
            counter.was_called.clear()
            await asyncio.to_thread(readers.wake)
            await counter.was_called.wait()
            assert counter.calls == step
        await asyncio.sleep(2 * LONGEST_WAIT)
        return counter.calls

    assert asyncio.run(run()) == 20
