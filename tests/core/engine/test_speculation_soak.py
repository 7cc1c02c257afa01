"""Random drafts in an engine whose answers are checked, and planted faults."""

from __future__ import annotations

import pytest

from depth import mostly_full
from inl.errors import ProtocolError
from inl.scheduling.scheduler import Scheduler
from inl.scheduling.speculation import Speculation
from inl.scheduling.uniforms import mix
from inl.testing.hash_runner import HashRunner
from soak import Parts, WrongText, soak


@pytest.mark.parametrize("seed", mostly_full((0, 1, 2, 3)))
def test_outputs_with_drafts_match_the_oracle(seed, report, depth):
    steps, least = depth(2_000, 25_000), depth(10, 50)
    counts = soak(seed, steps, Parts(speculation=Speculation), world_steps=500)
    report(", ".join(f"{counts[name]} {name}" for name in sorted(counts)))
    assert counts["steps"] >= steps
    for name in (
        "preemptions",
        "cancelled",
        "prefix hit tokens",
        "stop",
        "masked requests",
        "full requests",
        "verifying steps in flight",
    ):
        assert counts[name] > least, name
    rejected = counts["drafts"] - counts["accepted drafts"]
    assert min(counts["accepted drafts"], rejected) > 10 * least


class StaleDrafts(HashRunner):
    """Sometimes accepts a draft that the sampled token differs from."""

    def _compute(self, task):
        drafts = task.row.drafts
        if drafts and mix(task.step.number) % 7 == 0:
            drafts[:] = drafts[1:] + drafts[:1]
            task.state.cells_fault = True
        super()._compute(task)


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
        if task.step.bucket.verifies and accepted > 1 and mix(task.step.number) % 7 == 0:
            task.state.cached -= 1


class KeepsRejected(Speculation):
    """Plans on as if every draft had been accepted."""

    def collected(self, chunk, accepted):
        super().collected(chunk, chunk.stop - chunk.start)


class EarlyPublish(Scheduler):
    """Publishes blocks that contain drafts before they are verified."""

    def plan(self):
        plan = super().plan()
        prefix_cache = self._requests.prefix_cache
        for request, _, stop, drafts in plan.chunks:
            if prefix_cache and drafts and plan.has_drafts and request.slot:
                known, request.tokens = request.tokens, [*request.tokens, *drafts.tokens]
                prefix_cache.publish(request, min(stop, len(request.tokens)))
                request.tokens = known
        return plan


class FirstUniform(Speculation):
    """Sends random numbers as if no step were in flight."""

    def _extend_row(self, step, at, count, proposal, requests):
        super()._extend_row(step, at, count, proposal, requests)
        chunk = step.chunks[at]
        drafts = chunk.drafts._replace(least=chunk.start)
        step.chunks[at] = chunk._replace(drafts=drafts)


@pytest.mark.parametrize(
    "planted",
    [
        {"runner": AcceptsTooMany},
        {"runner": AcceptsTooFew},
        {"speculation": KeepsRejected},
        {"speculation": FirstUniform},
        {"scheduler": EarlyPublish},
    ],
    ids=lambda planted: next(iter(planted.values())).__name__,
)
def test_planted_faults_are_found(planted):
    parts = Parts(**{"speculation": Speculation, **planted})
    with pytest.raises((WrongText, ProtocolError)):
        for seed in range(4):  # a few seeds may not show the fault
            soak(seed, 2_000, parts, world_steps=200)
