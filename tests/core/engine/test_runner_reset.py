"""After an exception at any instruction, runner and scheduler agree again."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from random import Random

import numpy as np
import pytest

from depth import SEED, scaled
from inl.backend.reference import ReferenceBackend
from inl.device import Device
from inl.engine.core import EngineCore
from inl.errors import RunnerError, WorkerLost
from inl.models.llama import MODEL
from inl.protocol.runner import Runner
from inl.runners.group_runner import RankRunner
from inl.runners.worker_runner import WorkerRunner
from inl.scheduling.request import Request
from inl.testing.hash_runner import HashRunner
from inl.testing.tiny import (
    MemoryCheckpoint,
    local_runner,
    reference_ranks,
    tiny_llama,
)
from interrupts import Alarm, Injector, Strange

# Python drops an exception that is raised in __del__ or while a generator is finalized.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

PACKAGES = tuple(
    f"inl.{room}." for room in ("engine", "executor", "protocol", "runners", "workers")
)
FIELDS = [
    {"prompt": [5, 6, 7], "max_tokens": 6},
    {"prompt": range(9), "max_tokens": 5, "temperature": 0.7, "seed": 2},
    {"prompt": [8, 9], "max_tokens": 4, "allowed_token_ids": range(30)},
]


def hash_ranks(limits):
    return RankRunner(lambda _: HashRunner(limits), 2, abort=lambda: None)


def worker(limits):
    options = {"limits": asdict(limits)}
    return WorkerRunner(sys.executable, options, factory="worker_factories:hashes")


def checkpoint():
    return MemoryCheckpoint(*tiny_llama(np.random.default_rng(3), kv_heads=4))


def local(limits):
    backend = ReferenceBackend(Device("reference:0"))
    return local_runner(backend, MODEL, checkpoint(), limits)


def model_ranks(limits):
    return reference_ranks(Device("reference:0"), MODEL, checkpoint(), limits, ranks=2)


MAKERS = [
    HashRunner,
    hash_ranks,
    worker,
    pytest.param(local, marks=pytest.mark.full),
    pytest.param(model_ranks, marks=pytest.mark.full),
]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def core(request, small, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    made = EngineCore(request.param(small(vocab=96, blocks=(14,), depth=2)))
    yield made
    made.runner.close()


def run(core):
    while core.has_work:
        for event in core.step():
            if event.error is not None:
                raise event.error


def outputs(core):
    requests = [Request(**each) for each in FIELDS]
    for each in requests:
        core.add(each)
    run(core)
    return [each.output_ids for each in requests]


def interrupted(core, interrupt):
    """Outputs of requests that go on after ``interrupt``, where they were added."""
    requests = [Request(**each) for each in FIELDS]
    with suppress(KeyboardInterrupt, Strange), interrupt:
        for each in requests:
            core.add(each)
        run(core)
    run(core)
    return [each.output_ids if each.id else None for each in requests]


def check(found, wanted, place):
    for each, want in zip(found, wanted, strict=True):
        assert each in (None, want), place


@pytest.mark.parametrize(
    "events", ["lines", pytest.param("opcodes", marks=pytest.mark.full)]
)
def test_requests_go_on_exactly(core, events, report):
    wanted = outputs(core)
    process = getattr(core.runner, "pid", None)
    with Injector(events=events, packages=PACKAGES) as counter:
        outputs(core)
    step = max(counter.count // scaled(25, 50, 150), 1)
    for at in range(1, counter.count, step):
        error = (KeyboardInterrupt, Strange)[at // step % 2]
        injector = Injector(at, events, error, packages=PACKAGES)
        check(interrupted(core, injector), wanted, injector.place)
        assert outputs(core) == wanted, injector.place
    assert getattr(core.runner, "pid", None) == process
    assert not core.scheduler.live
    report(f"{type(core.runner).__name__}: {counter.count // step} {events}")


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timer")
def test_signals_at_random_times(core):
    wanted, random = outputs(core), Random(SEED)
    for _ in range(40):
        try:
            found = interrupted(core, Alarm(random.uniform(0.0001, 0.01)))
        except KeyboardInterrupt:
            """Raised between the last statement and the end of the timer."""
            run(core)
        else:
            check(found, wanted, None)
        assert outputs(core) == wanted


def test_an_interrupted_replacement_of_a_lost_worker_is_repeated(small, answer_of):
    class Lost(HashRunner):
        def collect(self):
            raise WorkerLost("killed")

    def replace(error):
        errors.append(str(error))
        if len(errors) < 3:
            raise KeyboardInterrupt
        return HashRunner(limits)

    limits, errors = small(), []
    core = EngineCore(Lost(limits), replace=replace)
    request = Request([1, 2, 3], max_tokens=5)
    core.add(request)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            core.step()
    run(core)
    assert errors == ["killed"] * 3
    assert core.restarts == 1
    assert request.output_ids == answer_of(Request([1, 2, 3], max_tokens=5), limits)


def test_a_runner_without_reset_ends_every_request(small):
    class Other(HashRunner):
        reset = Runner.reset

        def collect(self):
            raise KeyboardInterrupt

    core = EngineCore(Other(small()))
    requests = [Request([at], max_tokens=5) for at in range(6)]
    for each in requests:
        core.add(each)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    events = core.step()
    assert sorted(event.request for event in events) == [1, 2, 3, 4, 5, 6]
    assert all("this runner has no reset" in str(event.error) for event in events)
    assert not core.has_work
    with pytest.raises(RunnerError, match="create another engine"):
        core.add(Request([1]))
