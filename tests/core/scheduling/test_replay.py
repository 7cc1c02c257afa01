"""``SchedulerConfig.replay``: output tokens are always decoded one by one."""

from __future__ import annotations

from dataclasses import replace

from inl.engine.core import EngineCore
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.testing.hash_runner import HashRunner
from soak import Parts, soak


def run(limits, prompts, *, replay, **options):
    """The idle engine, its requests, and (chunk, whether it is a decoding row)."""
    core = EngineCore(HashRunner(limits), SchedulerConfig(replay=replay))
    plan, chunks = core.scheduler.plan, []

    def watched():
        found = plan()
        for row, chunk in enumerate(found.chunks):
            chunks.append((chunk, row < found.decode_rows))
        return found

    core.scheduler.plan = watched
    requests = [Request(ids, **options) for ids in prompts]
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    return core, requests, chunks


PROMPTS = [range(1, 10), range(20, 26), [7], range(40, 52)]


def test_output_tokens_are_decoding_rows(small, answer_of):
    limits = small(blocks=(11,))
    options = {"max_tokens": 14, "temperature": 0.7, "seed": 3}
    core, requests, chunks = run(limits, PROMPTS, replay=True, **options)
    assert core.stats.preemptions > 0
    for request in requests:
        assert request.output_ids == answer_of(request, limits)
    for (request, start, stop, _), decoding in chunks:
        assert decoding == (start >= request.prompt_tokens)
        assert stop - start == 1 if decoding else stop <= request.prompt_tokens


def test_without_replay_a_preempted_output_is_prefilled(small):
    core, _, chunks = run(small(blocks=(11,)), PROMPTS, replay=False, max_tokens=14)
    assert core.stats.preemptions > 0
    assert any(stop > request.prompt_tokens + 1 and not decoding
               for (request, _, stop, _), decoding in chunks)  # fmt: skip


def test_only_blocks_of_prompts_are_published(small):
    limits = small(blocks=(30,))
    core, (request,), _ = run(limits, [range(1, 10)], replay=True, max_tokens=14)
    again = Request(request.tokens, max_tokens=2)
    core.add(again)
    while core.has_work:
        core.step()
    assert again.cached_tokens == 8


class Replayed(Scheduler):
    """A scheduler that always replays."""

    def __init__(self, limits, policy=None, **rest):
        super().__init__(
            limits, replace(policy or SchedulerConfig(), replay=True), **rest
        )


def test_outputs_match_the_oracle(depth):
    """With cancellations, preemptions, shared prefixes and penalties in any mixture."""
    counts = soak(13, depth(2_000, 5_000), Parts(scheduler=Replayed))
    for name in ("preemptions", "cancelled", "prefix hit tokens", "full requests"):
        assert counts[name] > 5, name
