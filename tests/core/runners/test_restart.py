"""A runner that is lost in mid-stream, and a fresh one that goes on with the text."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from random import Random

import pytest

from inl.config import EngineConfig
from inl.engine.core import EngineCore
from inl.errors import OutOfMemory, RequestError, RunnerError, WorkerLost
from inl.runners.startup import MAX_RESTARTS, Restarts
from inl.runners.worker_runner import WorkerRunner
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.step import Bucket
from inl.testing.hash_runner import HashRunner


class Mortal(HashRunner):
    """Is lost at its ``life``-th call, whichever that is."""

    def __init__(self, limits, life, *, lag=None):
        super().__init__(limits, lag=lag)
        self.life = life
        self.closes = 0

    def live(self):
        self.life -= 1
        if self.life < 0:
            raise WorkerLost("worker: was killed by a test")

    def submit(self, message):
        self.live()
        super().submit(message)

    def collect(self):
        self.live()
        return super().collect()

    def close(self):
        self.closes += 1
        super().close()


REQUESTS = (
    {"prompt": range(10), "max_tokens": 9},
    {"prompt": range(12), "max_tokens": 15, "temperature": 0.5, "seed": 3},
    {"prompt": range(12), "max_tokens": 15, "temperature": 0.5, "seed": 4},
    {"prompt": [7], "max_tokens": 12, "temperature": 1.5, "seed": -4},
    {"prompt": range(9), "max_tokens": 7},
)


def finish(engine, numbers):
    """Tokens, and the errors that ended a request."""
    answers, errors = {number: [] for number in numbers}, {}
    for _ in range(2_000):
        if not engine.has_work:
            return answers, errors
        for number, token, reason, error in engine.step():
            if token is not None:
                answers[number].append(token)
            if reason == "error":
                errors[number] = error
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("blocks", [12, 30])
@pytest.mark.parametrize(
    "policy",
    [
        SchedulerConfig(),
        SchedulerConfig(token_budget=3),
        SchedulerConfig(use_kv_cache=False),
        SchedulerConfig(prefix_cache=False, max_rows=2),
    ],
    ids=["plain", "chunks", "uncached", "two rows"],
)
def test_wherever_it_is_lost_the_text_is_the_same(small, answer_of, policy, blocks):
    limits = small(blocks=(blocks,))
    wanted = [answer_of(Request(**each), limits) for each in REQUESTS]
    for life in range(0, 60, 3):
        random = Random(life)
        runners = [Mortal(limits, life, lag=random)]

        def fresh(error, runners=runners, random=random):
            runners.append(Mortal(limits, 10_000, lag=random))
            return runners[-1]

        engine = EngineCore(runners[0], policy, replace=fresh)
        numbers = [engine.add(Request(**each)) for each in REQUESTS]
        answers, errors = finish(engine, numbers)
        assert not errors
        assert [answers[number] for number in numbers] == wanted
        assert engine.restarts == len(runners) - 1 == (runners[0].life < 0)
        assert engine.runner is runners[-1]
        assert [each.closes for each in runners[:-1]] == [1] * engine.restarts
        assert runners[-1].slots_in_use == []
        (pool,) = engine.scheduler.kv_cache.pools
        assert pool.used_blocks == 0


def test_again_and_again(small, answer_of):
    limits = small(blocks=(30,))
    engine = EngineCore(
        Mortal(limits, 11),
        replace=lambda error: Mortal(limits, 11 + 2 * engine.restarts),
    )
    numbers = [engine.add(Request(**each)) for each in REQUESTS]
    answers, errors = finish(engine, numbers)
    assert not errors
    assert engine.restarts > 3
    for number, each in zip(numbers, REQUESTS, strict=True):
        assert answers[number] == answer_of(Request(**each), limits)


def test_elsewhere_with_other_blocks_and_programs(small, answer_of):
    limits = small(blocks=(30,))
    other = small(
        blocks=(50,), block_size=2, max_blocks_per_seq=20, slots=3, depth=1,
        buckets=tuple(Bucket(t, 2, 1, "sample") for t in (2, 8)),
    )  # fmt: skip
    engine = EngineCore(Mortal(limits, 20), replace=lambda error: HashRunner(other))
    numbers = [engine.add(Request(**each)) for each in REQUESTS]
    answers, errors = finish(engine, numbers)
    assert not errors
    for number, each in zip(numbers, REQUESTS, strict=True):
        assert answers[number] == answer_of(Request(**each), limits)


def test_prefixes_are_named_anew_where_blocks_are_larger(small, answer_of):
    limits = small(blocks=(60,), block_size=2, max_blocks_per_seq=20)
    fields = [
        {"prompt": [1, 2, 3, 4, number, 9, 9, 9, 9], "max_tokens": 9}
        for number in range(4)
    ]
    engine = EngineCore(
        Mortal(limits, 9),
        SchedulerConfig(token_budget=9),
        replace=lambda error: HashRunner(small(blocks=(60,), block_size=8)),
    )
    numbers = [engine.add(Request(**each)) for each in fields]
    answers, errors = finish(engine, numbers)
    assert not errors
    assert engine.restarts == 1
    for number, each in zip(numbers, fields, strict=True):
        assert answers[number] == answer_of(Request(**each), limits)


@pytest.mark.parametrize(
    "changes",
    [{"vocab": 99}, {"max_blocks_per_seq": 2}, {"buckets": (Bucket(32, 4),)}],
    ids=["vocabulary", "context", "greedy only"],
)
def test_a_fresh_one_that_cannot_hold_what_was_promised(small, changes):
    limits = small(blocks=(30,))
    engine = EngineCore(
        Mortal(limits, 9), replace=lambda error: HashRunner(small(**changes))
    )
    numbers = [engine.add(Request(**each)) for each in REQUESTS]
    _, errors = finish(engine, numbers)
    assert sorted(errors) == numbers
    assert all("the new one" in str(error) for error in errors.values())


def test_without_a_replacement_every_request_ends_with_the_loss(small):
    engine = EngineCore(Mortal(small(), 5))
    numbers = [engine.add(Request(**each)) for each in REQUESTS]
    _, errors = finish(engine, numbers)
    assert sorted(errors) == numbers
    assert {type(error) for error in errors.values()} == {WorkerLost}
    with pytest.raises(RunnerError, match="create another engine"):
        engine.add(Request([1]))


def test_only_a_lost_worker_is_replaced(small):
    def refuse(message):
        raise OutOfMemory("no room")

    runner = HashRunner(small())
    runner.submit = refuse
    engine = EngineCore(runner, replace=lambda error: pytest.fail("was replaced"))
    number = engine.add(Request([1, 2]))
    _, errors = finish(engine, [number])
    assert type(errors[number]) is OutOfMemory


def test_a_replacement_that_does_not_start_ends_every_request(small):
    def fail(error):
        raise OutOfMemory("no room for another")

    engine = EngineCore(Mortal(small(), 5), replace=fail)
    numbers = [engine.add(Request(**each)) for each in REQUESTS]
    _, errors = finish(engine, numbers)
    assert {type(error) for error in errors.values()} == {OutOfMemory}
    assert engine.restarts == 0


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "5", True, None])
def test_a_time_limit_that_is_none(seconds):
    with pytest.raises(RequestError, match=r"EngineConfig\.worker_seconds: found"):
        EngineConfig(worker_seconds=seconds)


def test_restarts_are_limited_in_time(caplog):
    now = [100.0]
    restarts = Restarts(object, clock=lambda: now[0])
    lost = WorkerLost("killed")
    for _ in range(MAX_RESTARTS):
        now[0] += 10
        restarts(lost)
    assert caplog.text.count("restarting the worker: killed") == MAX_RESTARTS
    with pytest.raises(WorkerLost, match=r"3 workers were lost within 60 s.*killed"):
        restarts(lost)
    now[0] = 100 + 10 + 60.5
    restarts(lost)
    with pytest.raises(WorkerLost):
        restarts(lost)


@pytest.fixture
def workers(monkeypatch, small, tmp_path):
    """Starts processes, each with a HashRunner."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    limits = small(blocks=(30,))
    made = []

    def begin(error=None, factory="hashes", **options):
        options["limits"] = asdict(limits)
        made.append(
            WorkerRunner(sys.executable, options, factory=f"worker_factories:{factory}")
        )
        return made[-1]

    begin.made, begin.limits = made, limits
    yield begin
    for each in made:
        each.close()


def test_a_killed_process_is_replaced_in_mid_stream(workers, answer_of):
    first = workers()
    engine = EngineCore(first, replace=workers)
    numbers = [engine.add(Request(**each)) for each in REQUESTS]
    answers = {number: [] for number in numbers}
    while engine.has_work:
        for number, token, _, error in engine.step():
            assert error is None
            answers[number].append(token)
        if sum(map(len, answers.values())) >= 9 and engine.runner is first:
            os.kill(first.pid, signal.SIGKILL)
    assert engine.restarts == 1
    assert len({each.pid for each in workers.made}) == 2
    for number, each in zip(numbers, REQUESTS, strict=True):
        assert answers[number] == answer_of(Request(**each), workers.limits)


def test_a_process_that_dies_within_a_step(workers, answer_of, tmp_path):
    first = workers(factory="dying", at=4, flag=str(tmp_path / "died"))
    engine = EngineCore(first, replace=workers)
    numbers = [engine.add(Request(**each)) for each in REQUESTS]
    answers, errors = finish(engine, numbers)
    assert not errors
    assert engine.restarts == 1
    for number, each in zip(numbers, REQUESTS, strict=True):
        assert answers[number] == answer_of(Request(**each), workers.limits)
