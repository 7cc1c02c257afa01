"""Random drafts in an engine whose answers are checked, and planted faults."""

from __future__ import annotations

from hashlib import sha256

import pytest

from depth import mostly_full
from inl.errors import ProtocolError
from inl.scheduling.scheduler import Scheduler
from inl.spec.uniforms import mix
from inl.speculation.planner import Speculation
from inl.testing.hash_runner import HashRunner
from soak import Parts, soak


@pytest.mark.parametrize("seed", mostly_full((6, 1, 5, 7)))
def test_outputs_with_drafts_match_the_oracle(seed, report, depth):
    steps, least = depth(1_000, 2_500, 25_000), depth(2, 1, 10)
    parts = Parts(speculation=Speculation, adapters=True)
    counts = soak(seed, steps, parts, world_steps=100)
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    assert counts["steps"] >= steps
    for name in (
        "preemptions",
        "cancelled",
        "prefix hit tokens",
        "stop",
        "masked requests",
        "guided requests",
        "guided drafts",
        "further samples",
        "requests of adapters",
        "full requests",
        "verifying steps in flight",
    ):
        assert counts[name] > least, name
    rejected = counts["drafts"] - counts["accepted drafts"]
    assert min(counts["accepted drafts"], rejected) > 10 * least


@pytest.mark.full
@pytest.mark.parametrize(
    "more", [{"speculation": Speculation}, {"repeats": True}], ids=lambda more: [*more]
)
def test_a_soak_is_a_function_of_its_seed(more):
    """Frames and replies are the same in a second run, whatever the time it takes."""
    digests = []

    class Recorded(HashRunner):
        def submit(self, message):
            digest.update(message.tobytes())
            super().submit(message)

        def collect(self):
            reply = super().collect()
            digest.update(reply.tokens.tobytes())
            return reply

    for _ in range(2):
        digest = sha256()
        soak(7, 300, Parts(runner=Recorded, adapters=True, **more), world_steps=100)
        digests.append(digest.hexdigest())
    assert digests[0] == digests[1]


class StaleDraft(HashRunner):
    """Computes another token than the draft that it accepts, in some steps."""

    def _compute(self, task):
        start = task.state.cached
        super()._compute(task)
        accepted, drafts = task.state.cached - start, task.row.drafts
        if drafts and accepted > 1 and mix(task.step.number) % 7 == 0:
            stale = (drafts[-1] + 1) % self.limits.vocab
            self.cells.write(task.tables, start + 1, [stale], task.state.adapter)


class AcceptsTooMany(HashRunner):
    """Keeps the cells of a rejected draft in some steps."""

    def _compute(self, task):
        before = task.state.cached
        super()._compute(task)
        rejected = len(task.row.tokens) - (task.state.cached - before)
        if task.step.bucket.verifies and rejected and mix(task.step.number) % 7 == 0:
            task.state.cached += 1


class AcceptsTooFew(HashRunner):
    """Forgets the cells of an accepted draft in some steps."""

    def _compute(self, task):
        before = task.state.cached
        super()._compute(task)
        accepted = task.state.cached - before
        if (
            task.step.bucket.verifies
            and accepted > 1
            and mix(task.step.number) % 7 == 0
        ):
            task.state.cached -= 1


class KeepsRejected(Speculation):
    """Plans on as if every draft had been accepted."""

    def collected(self, chunk, accepted):
        super().collected(chunk, chunk.stop - chunk.start)


class EarlyWindowFree(Scheduler):
    """Frees blocks outside the window of a position that may be taken back."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        free = self._requests.free_out_of_window

        def early(step, request, *, max_updates):
            uncertain, request.uncertain = request.uncertain, 0
            free(step, request, max_updates=max_updates)
            request.uncertain = uncertain

        self._requests.free_out_of_window = early


class FirstUniform(Speculation):
    """Sends random numbers as if no step were in flight."""

    def _extend_row(self, step, at, *rest):
        super()._extend_row(step, at, *rest)
        chunk = step.chunks[at]
        drafts = chunk.drafts._replace(least=chunk.start)
        step.chunks[at] = chunk._replace(drafts=drafts)


@pytest.mark.parametrize(
    "planted",
    [
        {"runner": StaleDraft},
        {"runner": AcceptsTooMany},
        {"runner": AcceptsTooFew},
        {"speculation": KeepsRejected},
        {"speculation": FirstUniform},
        {"scheduler": EarlyWindowFree},
    ],
    ids=lambda planted: next(iter(planted.values())).__name__,
)
def test_planted_faults_are_found(planted):
    parts = Parts(**{"speculation": Speculation, **planted})

    def worlds():
        for seed in range(8):  # a few seeds may not show the fault
            soak(seed, 1_000, parts, world_steps=200)

    # Some end in a failed check of the engine or of the drafter.
    with pytest.raises((AssertionError, ProtocolError)):
        worlds()
