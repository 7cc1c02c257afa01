"""A runner without memory for a step: its requests end, the others do not notice."""

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
    """Has no room for steps of which ``refuses`` says so."""

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


class FullThere(HashRunner):
    """Says so when the step's tokens are asked for, as a runner elsewhere does.

    By then there are steps behind it, of the same rows too.
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


def run(engine, told=()):
    """Errors and answers by request, from events before and until nothing is left."""
    told = list(told)
    for _ in range(5_000):
        if not engine.has_work:
            break
        told += engine.step()
    assert not engine.has_work
    answers = {}
    for event in told:
        if event.token is not None:
            answers.setdefault(event.request, []).append(event.token)
    return {event.request: event.error for event in told if event.error}, answers


@pytest.mark.parametrize("kind", [Full, FullThere])
def test_a_step_that_does_not_fit_ends_its_requests_alone(kind, small, answer_of):
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
@pytest.mark.parametrize("kind", [Full, FullThere])
def test_nothing_leaks_and_survivors_are_right(kind, seed, small, answer_of):
    draw = random.Random(seed)
    limits = small(blocks=(40,))
    runner = kind(limits, lambda step: draw.random() < 0.1)
    engine = EngineCore(runner, SchedulerConfig(token_budget=8, max_rows=4))
    free = engine.scheduler.kv_cache.available_blocks
    wanted, told = {}, []
    for _ in range(30):
        ids = [draw.randrange(limits.vocab) for _ in range(draw.randint(1, 14))]
        fields = {"max_tokens": draw.randint(1, 6)}
        wanted[engine.add(Request(ids, **fields))] = answer_of(
            Request(ids, **fields), limits
        )
        if draw.random() < 0.5:
            told += engine.step()
    errors, answers = run(engine, told)
    assert runner.refused
    assert 0 < len(errors) < len(wanted)
    assert {n: a for n, a in answers.items() if n not in errors} == {
        n: answer for n, answer in wanted.items() if n not in errors
    }
    assert {type(error) for error in errors.values()} == {OutOfMemory}, errors
    assert engine.scheduler.kv_cache.available_blocks == free
    assert not engine.scheduler.in_flight
    assert not engine.scheduler.running
