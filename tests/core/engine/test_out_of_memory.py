"""Out of memory in a step: its requests end, the others are unaffected."""

from __future__ import annotations

import random
from collections import deque

import pytest

from inl.engine.core import EngineCore
from inl.errors import OutOfMemory
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.message import STEP, header
from inl.testing.hash_runner import HashRunner


class Full(HashRunner):
    """Raises ``OutOfMemory`` in ``submit`` for steps that ``refuses`` selects."""

    def __init__(self, limits, refuses):
        super().__init__(limits)
        self.refuses, self.refused = refuses, 0

    def submit(self, message):
        found = header(message)
        if found.kind == STEP and self.refuses(found):
            self.refused += 1
            self._step = found.step
            raise OutOfMemory("4 bytes do not fit, 3 bytes are free")
        super().submit(message)


class FullWorker(HashRunner):
    """Raises ``OutOfMemory`` in ``collect``, as a worker does.

    By then later steps are in flight, also of the same rows.
    """

    def __init__(self, limits, refuses):
        super().__init__(limits)
        self.refuses, self.refused = refuses, 0
        self.flying = deque()

    def submit(self, message):
        super().submit(message)
        found = header(message)
        if found.kind == STEP:
            self.flying.append(self.refuses(found))

    def collect(self):
        reply = super().collect()
        if self.flying.popleft():
            self.refused += 1
            raise OutOfMemory("4 bytes do not fit, 3 bytes are free")
        return reply


def run(engine, events=()):
    """Errors and outputs by request, of given events and until nothing is left."""
    events = list(events)
    for _ in range(5_000):
        if not engine.has_work:
            break
        events += engine.step()
    assert not engine.has_work
    answers = {}
    for event in events:
        if event.token is not None:
            answers.setdefault(event.request, []).append(event.token)
    return {event.request: event.error for event in events if event.error}, answers


@pytest.mark.parametrize("kind", [Full, FullWorker])
def test_a_step_out_of_memory_ends_only_its_requests(kind, small, answer_of):
    limits = small(blocks=(60,))
    runner = kind(limits, lambda step: step.used_tokens > 12)
    engine = EngineCore(runner, SchedulerConfig(token_budget=16, max_rows=4))
    first = engine.add(Request([1, 2, 3], max_tokens=12))
    for _ in range(3):
        engine.step()
    late = [Request(range(4, 9), max_tokens=6), Request(range(20), max_tokens=4)]
    for _ in range(40):
        engine.step()
    wanted = answer_of(Request(late[0].tokens, max_tokens=6), limits)
    numbers = [engine.add(request) for request in (late[1], late[0])]
    errors, answers = run(engine)
    assert runner.refused == 1
    assert set(errors) <= {numbers[0], numbers[1]}
    assert type(errors[numbers[0]]) is OutOfMemory
    assert first not in errors
    again = engine.add(Request(late[0].tokens[:5], max_tokens=6))
    errors, answers = run(engine)
    assert errors == {}
    assert answers[again] == wanted


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [Full, FullWorker])
def test_nothing_leaks_and_other_requests_are_unaffected(kind, seed, small, answer_of):
    draw = random.Random(seed)
    limits = small(blocks=(40,))
    runner = kind(limits, lambda step: draw.random() < 0.1)
    engine = EngineCore(runner, SchedulerConfig(token_budget=8, max_rows=4))
    free = engine.scheduler.kv_cache.available_blocks
    expected, events = {}, []
    for _ in range(30):
        ids = [draw.randrange(limits.vocab) for _ in range(draw.randint(1, 14))]
        fields = {"max_tokens": draw.randint(1, 6)}
        expected[engine.add(Request(ids, **fields))] = answer_of(
            Request(ids, **fields), limits
        )
        if draw.random() < 0.5:
            events += engine.step()
    errors, answers = run(engine, events)
    assert runner.refused
    assert 0 < len(errors) < len(expected)
    assert {n: a for n, a in answers.items() if n not in errors} == {
        n: answer for n, answer in expected.items() if n not in errors
    }
    assert {type(error) for error in errors.values()} == {OutOfMemory}, errors
    assert engine.scheduler.kv_cache.available_blocks == free
    assert not engine.scheduler.in_flight
    assert not engine.scheduler.running
