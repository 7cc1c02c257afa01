"""Which snapshots of recurrent state are taken, and what they save."""

from __future__ import annotations

import dataclasses

import pytest

from hash_oracle import expected
from inl.backend.base import DeviceMemory
from inl.engine.core import EngineCore
from inl.errors import OutOfMemory, WorkerLost
from inl.kv_tiers import state_snapshots
from inl.kv_tiers.state_snapshots import StateSnapshots, automatic_snapshot_bytes
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.spec.limits import Limits
from inl.spec.message import READ, header
from inl.testing.hash_runner import HashRunner

LIMITS = Limits(9, (200,), 4, 48, 97, depth=2)
CONFIG = SchedulerConfig(recurrent=True, snapshot_tokens=8, snapshot_interval=16)


class Served:
    """An engine on a runner with recurrent state."""

    def __init__(
        self, limits=LIMITS, capacity=1 << 20, runner=HashRunner, replace=None, **config
    ):
        self.limits, self.stops = limits, []
        self.snapshots = StateSnapshots(capacity)
        self.engine = EngineCore(
            runner(limits, recurrent=True), dataclasses.replace(CONFIG, **config),
            snapshots=self.snapshots, replace=replace,
        )  # fmt: skip

    def answer(self, *prompts, **fields):
        """Cached tokens of requests that run together, whose answers are right."""
        fields = {"max_tokens": 5, **fields}
        requests = [Request(prompt, **fields) for prompt in prompts]
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            assert [each.error for each in self.engine.step() if each.error] == []
            plans = self.engine.scheduler.in_flight
            self.stops += [each.stop for each in plans[-1].snapshots] if plans else []
        for request in requests:
            want, _ = expected(request, self.limits, 99, frozenset(), recurrent=True)
            assert request.output_ids == want
        self.output = requests[-1].output_ids
        return [request.cached_tokens for request in requests]


def text(count, seed=0):
    return [(7 * at + 3 * seed + at * at * (seed + 1)) % 97 for at in range(count)]


def test_the_same_prompt_continues_from_the_last_border():
    served = Served()
    assert served.answer(text(30)) == [0]
    assert served.answer(text(30)) == [28]
    # At 28, and at 32 in the output.
    assert served.snapshots.counts == {"taken": 2, "restored": 1, "dropped": 0}


def test_a_conversation_continues_from_its_last_turn():
    served, ids = Served(), text(30)
    served.answer(ids, max_tokens=20)
    ids += [*served.output, *text(9, 3)]
    # Of the prompt at 28, and of the output at multiples of 16: 32 and 48.
    assert served.answer(ids) == [48]


def test_a_common_beginning_is_shared_from_the_third_prompt_on():
    """The blocks of the first show the second one where they part."""
    served = Served()
    prompts = [[*text(21), *text(20, seed)] for seed in (1, 2, 3)]
    assert [served.answer(each) for each in prompts] == [[0], [0], [20]]


def test_equal_prompts_at_once_are_computed_once():
    served = Served(wait_tokens=8)
    assert served.answer(*[text(30)] * 3) == [0, 28, 28]


def test_samples_of_a_prompt_share_it_without_a_prefix_cache():
    served = Served(prefix_cache=False)
    assert served.answer(*[text(30)] * 3, sample_group=1) == [0, 28, 28]
    assert served.answer(text(30)) == [0]


def test_short_prompts_leave_no_snapshot():
    served = Served(snapshot_tokens=12)
    assert served.answer(text(11), text(9), text(10, 2), max_tokens=2) == [0, 0, 0]
    assert len(served.snapshots) == 0


def test_chunks_of_a_long_prompt_end_at_borders():
    served = Served(token_budget=18)
    served.answer(text(90))
    assert served.answer([*text(70), *text(5, 4)]) == [64]


def test_snapshots_have_a_limit_in_bytes():
    served = Served(capacity=3 * 8)
    for seed in range(5):
        served.answer(text(30, seed), max_tokens=1)
    assert served.snapshots.counts["dropped"] == 2
    assert served.snapshots.used_bytes == 24
    assert served.answer(text(30), max_tokens=1) == [0]
    assert served.answer(text(30, 4), max_tokens=1) == [28]


def test_without_snapshots_recurrent_models_share_nothing():
    engine = EngineCore(HashRunner(LIMITS, recurrent=True), CONFIG)
    for _ in range(2):
        request = Request(text(30), max_tokens=3)
        engine.add(request)
        while engine.has_work:
            engine.step()
        assert request.cached_tokens == 0
        want, _ = expected(request, LIMITS, 99, frozenset(), recurrent=True)
        assert request.output_ids == want


def test_a_forgotten_prefix_cache_forgets_snapshots():
    served = Served()
    served.answer(text(30))
    served.engine.reset_prefix_cache()
    assert len(served.snapshots) == 0
    assert served.answer(text(30)) == [0]


def test_a_row_that_stops_in_a_repeated_step_leaves_no_snapshot():
    """Its state is not that of the border at which it was planned to end."""
    prompt, limits = text(12), dataclasses.replace(LIMITS, depth=1, decode_steps=8)
    plain, _ = expected(Request(prompt, max_tokens=9), limits, 99, (), recurrent=True)
    served = Served(limits, decode_steps=8, repeat_seconds=float("inf"))
    ends = plain.index(plain[2]) + 1
    request = Request(prompt, max_tokens=9, stop_ids=frozenset({plain[2]}))
    served.engine.add(request)
    while served.engine.has_work:
        served.engine.step()
    assert request.output_ids == plain[:ends]
    for key in served.engine.scheduler.block_keys(request)[3:]:
        assert not served.snapshots.holds(key)


def test_a_new_runner_begins_without_snapshots():
    class Mortal(HashRunner):
        left = 12

        def collect(self):
            self.left -= 1
            if not self.left:
                raise WorkerLost("killed")
            return super().collect()

    def fresh(_error):
        assert len(served.snapshots) > 0
        return HashRunner(LIMITS, recurrent=True)

    served = Served(runner=Mortal, replace=fresh)
    assert served.answer(text(30), max_tokens=20) == [0]
    assert served.engine.restarts == 1
    assert served.answer(text(30)) == [28]


@pytest.mark.parametrize("kind", ["read", "step"])
def test_a_runner_without_memory_leaves_no_snapshot(kind):
    class Full(HashRunner):
        fails = False

        def submit(self, message):
            if self.fails and kind == "read" and header(message).kind == READ:
                raise OutOfMemory("no memory")
            super().submit(message)

        def collect(self):
            reply = super().collect()
            if self.fails and kind == "step":
                raise OutOfMemory("no memory")
            return reply

    served = Served(runner=Full)
    served.engine.runner.fails = True
    request = Request(text(30), max_tokens=3)
    served.engine.add(request)
    while served.engine.has_work:
        served.engine.step()
    assert len(served.snapshots) == 0
    served.engine.runner.fails = False
    assert served.answer(text(30)) == [0]
    assert served.answer(text(30)) == [28]


@pytest.mark.parametrize(("free", "least"), [(16 << 30, 2 << 30), (1 << 40, 8 << 30)])
def test_the_default_is_a_bounded_part_of_the_free_memory(free, least, monkeypatch):
    memory = DeviceMemory(total=1 << 40, free=free)
    monkeypatch.setattr(state_snapshots, "host_memory", lambda: memory)
    assert automatic_snapshot_bytes() == least
