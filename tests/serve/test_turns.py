"""What the event loop does at once is bounded, however many clients ask for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from inl.scheduling.sampling_params import TokenLogprob
from inl.serve import connections
from inl.serve.connections import Connections
from inl.serve.http_messages import SHORT_ANSWER, written
from inl.serve.job import Delta
from inl.serve.settings import ServerConfig


class Clock:
    """Processor time that passes while data are parsed only."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Loop:
    """Runs what was called soon, one pass at a time."""

    def __init__(self):
        self.soon = []

    def call_soon(self, callback):
        self.soon.append(callback)

    def run_pass(self):
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()


class Parts:
    """A connection that holds some parts, two of which use up a pass."""

    def __init__(self, loop, clock, count, parsed):
        self.loop, self.count = loop, count
        self._clock, self._parsed = clock, parsed

    def parse_held(self):
        self._parsed.append(self)
        self._clock.now += 0.75 * connections.PASS_SECONDS
        self.count -= 1
        return self.count > 0

    def parse(self, data):
        del data
        self._parsed.append(self)
        self._clock.now += 0.75 * connections.PASS_SECONDS


@pytest.fixture
def turns():
    clock, loop, parsed = Clock(), Loop(), []
    waiting = Connections(ServerConfig(), limit=1000, clock=clock)

    def make(count):
        return Parts(loop, clock, count, parsed)

    return waiting, make, loop, parsed


def test_a_pass_parses_for_a_limited_time_whatever_waits(turns):
    waiting, make, loop, parsed = turns
    for _ in range(200):
        waiting.wait(make(3))
    passes = []
    while loop.soon:
        before = len(parsed)
        loop.run_pass()
        passes.append(len(parsed) - before)
    assert len(parsed) == 600
    assert max(passes) == 4  # half of them for new data


def test_new_data_do_not_wait_for_the_rest_of_old_data(turns):
    waiting, make, loop, parsed = turns
    for _ in range(200):
        waiting.wait(make(100))
    for _ in range(200):
        loop.run_pass()
    late = make(1)
    waiting.wait(late)
    loop.run_pass()
    assert late in parsed


def test_data_are_parsed_as_they_arrive_until_the_pass_is_used_up(turns):
    waiting, make, loop, _ = turns
    assert waiting.has_time
    for _ in range(2):
        waiting.parse(make(1), b"x")
    assert not waiting.has_time
    loop.run_pass()
    assert waiting.has_time


@pytest.mark.parametrize(
    ("delta", "is_long"),
    [
        (Delta("a", token_ids=[1]), False),
        (Delta("a", token_ids=[1] * (SHORT_ANSWER + 1)), True),
        (Delta("a", [], [], [1] * 30, [TokenLogprob(1, -1.0, ((1, -1.0),) * 20)] * 30),
         True),
    ],
    ids=["short", "tokens", "logprobs"],
)  # fmt: skip
def test_long_parts_of_answers_are_written_on_a_thread(delta, is_long):
    ran = asyncio.run(written([delta], threading.current_thread))
    assert (ran is not threading.current_thread()) == is_long
