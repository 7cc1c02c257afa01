"""An error of the runner ends the requests of its step; the engine goes on."""

from __future__ import annotations

import random

import pytest

from inl.engine.core import EngineCore
from inl.errors import ProtocolError, RunnerError
from inl.protocol.runner import Runner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.testing.hash_runner import HashRunner

ERRORS = [OSError("the cable is out"), MemoryError(), ProtocolError("a word too many")]


class Failing(HashRunner):
    """Raises an error in the calls of a method that ``fails`` selects by number."""

    def __init__(self, limits, fails, method="collect", error=ERRORS[0]):
        super().__init__(limits)
        self.fails, self.method, self.error = fails, method, error
        self.calls = self.errors = 0

    def count(self, method):
        if method == self.method:
            self.calls += 1
            if self.fails(self.calls):
                self.errors += 1
                raise self.error

    def submit(self, message):
        self.count("submit")
        super().submit(message)

    def collect(self):
        self.count("collect")
        return super().collect()


def run(engine):
    """Errors and outputs by request, until nothing is left."""
    errors, answers = {}, {}
    for _ in range(5_000):
        if not engine.has_work:
            break
        for event in engine.step():
            assert event.request not in errors
            if event.token is not None:
                answers.setdefault(event.request, []).append(event.token)
            if event.error is not None:
                errors[event.request] = event.error
    assert not engine.has_work
    return errors, answers


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["submit", "collect"])
@pytest.mark.parametrize("call", [1, 2, 3, 9])
def test_a_step_that_fails_once_ends_its_requests_only(
    small, answer_of, method, call, error
):
    limits = small(blocks=(60,))
    runner = Failing(limits, lambda number: number == call, method, error)
    engine = EngineCore(runner, SchedulerConfig(max_rows=2))
    free = engine.scheduler.kv_cache.available_blocks
    fields = [{"prompt": [at, 2], "max_tokens": 3 + at} for at in range(6)]
    numbers = [engine.add(Request(**each)) for each in fields]
    errors, answers = run(engine)
    assert runner.errors == engine.failed_steps == 1
    assert 1 <= len(errors) <= 2, "rows of a step"
    assert {*errors.values()} == {error}
    for number, each in zip(numbers, fields, strict=True):
        if number not in errors:
            assert answers[number] == answer_of(Request(**each), limits)
    assert engine.failure is None
    assert engine.scheduler.kv_cache.available_blocks == free
    number = engine.add(Request([1]))
    assert run(engine)[0] == {}
    assert not engine.cancel(number)


@pytest.mark.parametrize("method", ["submit", "collect"])
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_runner_that_fails_always_ends_every_request(small, method, first):
    runner = Failing(small(), lambda number: number >= first, method)
    engine = EngineCore(runner)
    numbers = [engine.add(Request([1, 2], max_tokens=9)) for _ in range(7)]
    errors, _ = run(engine)
    assert sorted(errors) == numbers
    runner.fails = lambda number: False
    engine.add(Request([1]))
    assert run(engine)[0] == {}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("method", ["submit", "collect"])
def test_the_others_are_exact_whatever_fails(small, answer_of, method, seed):
    draw = random.Random(seed)
    limits = small(blocks=(40,))
    runner = Failing(limits, lambda _: draw.random() < 0.08, method)
    engine = EngineCore(runner, SchedulerConfig(token_budget=8, max_rows=4))
    free = engine.scheduler.kv_cache.available_blocks
    expected, errors, answers = {}, {}, {}
    for _ in range(25):
        ids = [draw.randrange(limits.vocab) for _ in range(draw.randint(1, 14))]
        fields = {"max_tokens": draw.randint(1, 6)}
        number = engine.add(Request(ids, **fields))
        expected[number] = answer_of(Request(ids, **fields), limits)
        if draw.random() < 0.3:
            failed, found = run(engine)
            errors |= failed
            answers |= found
    failed, found = run(engine)
    errors |= failed
    answers |= found
    assert runner.errors
    assert 0 < len(errors) < len(expected)
    done = {number: ids for number, ids in answers.items() if number not in errors}
    assert done == {n: ids for n, ids in expected.items() if n not in errors}
    assert engine.scheduler.kv_cache.available_blocks == free


def test_a_runner_that_cannot_be_reset_ends_the_engine(small):
    class Other(Failing):
        reset = Runner.reset

    engine = EngineCore(Other(small(), lambda number: number == 2))
    numbers = [engine.add(Request([1, 2], max_tokens=9)) for _ in range(7)]
    errors, _ = run(engine)
    assert sorted(errors) == numbers
    assert {*errors.values()} == {ERRORS[0]} == {engine.failure}
    with pytest.raises(RunnerError, match=r"cable is out\); create another engine"):
        engine.add(Request([1]))
    assert not engine.cancel(numbers[0])


def test_a_runner_that_cannot_be_reset_is_replaced(small, answer_of):
    class Other(Failing):
        reset = Runner.reset

    limits, seen = small(), []

    def replace(error):
        seen.append(error)
        return HashRunner(limits)

    runner = Other(limits, lambda number: number == 2)
    engine = EngineCore(runner, SchedulerConfig(max_rows=1), replace=replace)
    numbers = [engine.add(Request([at, 2], max_tokens=9)) for at in range(3)]
    errors, answers = run(engine)
    assert seen == [ERRORS[0]]
    assert engine.restarts == 1
    (failed,) = errors
    for at, number in enumerate(numbers):
        if number != failed:
            wanted = answer_of(Request([at, 2], max_tokens=9), limits)
            assert answers[number] == wanted
