"""Random repeated steps in an engine whose answers are checked, and planted faults."""

from __future__ import annotations

import pytest

from depth import mostly_full
from inl.engine import frame_encoder
from inl.errors import ProtocolError
from inl.scheduling.scheduler import Scheduler
from inl.spec.uniforms import mix
from inl.testing.hash_runner import HashRunner
from soak import Parts, soak


@pytest.mark.parametrize("seed", mostly_full((6, 10, 3, 12)))
def test_outputs_of_repeated_steps_match_the_oracle(seed, report, depth):
    steps, least = depth(1_200, 3_000, 25_000), depth(2, 1, 10)
    parts = Parts(repeats=True, adapters=True)
    counts = soak(seed, steps, parts, world_steps=100)
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    for name in (
        "preemptions",
        "cancelled",
        "prefix hit tokens",
        "stop",
        "full requests",
        "further samples",
        "requests of adapters",
        "repeated steps in flight",
    ):
        assert counts[name] > least, name
    # Few, since a step with such a row is not repeated.
    assert min(counts["masked requests"], counts["guided requests"]) > 0
    assert counts["repeated tokens"] > steps / 4


class GoesOn(HashRunner):
    """Computes past the stop of a row."""

    def _stops(self, task, token):
        return False


class StopsEarly(HashRunner):
    """Stops some rows before their end."""

    def _stops(self, task, token):
        return super()._stops(task, token) or mix(task.step.number + token) % 20 == 0


class WrongPosition(HashRunner):
    """Writes some tokens one cell too far."""

    def _sample_token(self, task, sample, number):
        token = super()._sample_token(task, sample, number)
        if task.row.steps > number + 1 and mix(task.step.number) % 7 == 0:
            task.state.cached += 1
        return token


class StaleFeedback(HashRunner):
    """Feeds back the token that the step before has sampled last."""

    def _repeat(self, task):
        before = task.state.last
        super()._repeat(task)
        if task.row.steps > 1 and mix(task.step.number) % 7 == 0:
            task.state.last = before


class BlockNotReturned(Scheduler):
    """Keeps a block that was reserved for tokens after the end of a request."""

    def finish(self, request, *args):
        tables = request.block_table
        if tables and len(tables[0]) * self.limits.block_size > len(request.tokens):
            for blocks in tables:
                del blocks[-1]
        return super().finish(request, *args)


class Overrun(Scheduler):
    """Plans a row of a repeated step for more tokens than it has blocks for."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._requests.grow_ahead = lambda _step, _request, _stop, count: count


class EarlyWindowFree(Scheduler):
    """Frees blocks that leave the window of the last token of a repeated step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        free = self._requests.free_out_of_window

        def early(step, request, *, max_updates, position=None):
            late = None if position is None else request.scheduled
            free(step, request, max_updates=max_updates, position=late)

        self._requests.free_out_of_window = early


@pytest.mark.parametrize(
    "planted",
    [
        {"runner": GoesOn},
        {"runner": StopsEarly},
        {"runner": WrongPosition},
        {"runner": StaleFeedback},
        {"scheduler": BlockNotReturned},
        {"scheduler": Overrun},
        {"scheduler": EarlyWindowFree},
    ],
    ids=lambda planted: next(iter(planted.values())).__name__,
)
def test_planted_faults_are_found(planted):
    assert_found(Parts(repeats=True, **planted))


def test_the_random_number_of_another_step_is_found(monkeypatch):
    row = frame_encoder._repeated_row

    def late(chunk):
        return row(chunk._replace(start=chunk.start + 1, stop=chunk.stop + 1))._replace(
            tokens=row(chunk).tokens
        )

    monkeypatch.setattr(frame_encoder, "_repeated_row", late)
    assert_found(Parts(repeats=True))


def test_a_lost_stop_id_is_found(monkeypatch):
    row = frame_encoder._repeated_row

    def lossy(chunk):
        found = row(chunk)
        return found._replace(stop_ids=found.stop_ids[1:])

    monkeypatch.setattr(frame_encoder, "_repeated_row", lossy)
    assert_found(Parts(repeats=True))


def assert_found(parts):
    def worlds():
        for seed in range(8):  # a few seeds may not show the fault
            soak(seed, 1_000, parts, world_steps=200)

    # Some end in a failed check of the engine or of the runner.
    with pytest.raises((AssertionError, ProtocolError)):
        worlds()
