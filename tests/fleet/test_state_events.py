"""What front-ends know of snapshots of recurrent state: a prompt goes on from these."""

from __future__ import annotations

import asyncio
import random as draws
from collections import Counter
from types import SimpleNamespace

import msgspec

from depth import SEED, scaled
from inl.engine.core import EngineCore
from inl.fleet.block_feed import BlockFeed
from inl.fleet.prefix_index import BLOCK_TOKENS, PrefixIndex, block_keys, root_of
from inl.fleet.prefix_news import PrefixNews
from inl.fleet.router import Router
from inl.kv_tiers.state_snapshots import StateSnapshots
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.serve.frontends.messages import decode, encode
from inl.spec.limits import Limits
from inl.testing.hash_runner import HashRunner

LIMITS = Limits(9, (120,), 16, 48, 97, depth=2)
CONFIG = SchedulerConfig(recurrent=True, snapshot_tokens=16, snapshot_interval=64)


class Hybrid:
    """A scheduler on a runner with recurrent state, and a front-end's router."""

    def __init__(self, capacity=6 * 8):
        self.snapshots = StateSnapshots(capacity)
        runner = HashRunner(LIMITS, recurrent=True)
        self.core = EngineCore(runner, CONFIG, snapshots=self.snapshots)
        self.feed = BlockFeed(
            SimpleNamespace(
                core=self.core, tiers=None, snapshots=self.snapshots,
                report_kv_events=self.core.scheduler.report_kv_events,
            )
        )  # fmt: skip
        self.router, self.link = Router(), SimpleNamespace(number=0, address="a")
        self.router.add(0, 4, 1 << 20)
        self.news = PrefixNews(self.router, Counter())
        self.feed.follow(self, self.receive)

    def receive(self, message):
        self.news.apply(self.link, decode(encode(message)))

    def predicted(self, prompt):
        return self.router.choose(keys_of(prompt), len(prompt))[1]

    def answer(self, prompt):
        """Return what was cached of a prompt, and what the router had predicted."""
        self.feed.flush()
        predicted = self.predicted(prompt)
        request = Request(prompt, max_tokens=4)
        self.core.add(request)
        while self.core.has_work:
            assert [each.error for each in self.core.step() if each.error] == []
        return request.cached_tokens, predicted


def keys_of(prompt):
    return block_keys(prompt, root_of("", ""))


def text(count, seed):
    draw = draws.Random(seed)
    return [draw.randrange(97) for _ in range(count)]


def in_loop(test):
    async def run():
        test()

    asyncio.run(run())


def conversation():
    """Yield (cached, predicted) of prompts that part at borders of 64 tokens."""
    hybrid, draw, texts = Hybrid(), draws.Random(SEED), []
    for number in range(scaled(40, 400)):
        known = draw.choice(texts[-4:]) if texts and draw.random() < 0.7 else []
        prompt = known[: draw.randrange(0, len(known) + 1, BLOCK_TOKENS)]
        prompt = prompt + text(BLOCK_TOKENS * draw.randrange(1, 4), number) + [1]
        texts.append(prompt)
        yield hybrid.answer(prompt)
    assert hybrid.snapshots.counts["dropped"], "snapshots were evicted"


def test_a_hybrid_has_what_it_can_continue_and_no_more():
    def check():
        pairs = list(conversation())
        # A snapshot within a block of the index counts as one where that begins.
        apart = [cached - predicted for cached, predicted in pairs]
        assert 0 <= min(apart) <= max(apart) < BLOCK_TOKENS
        assert sum(cached > 0 for cached, _ in pairs) > len(pairs) / 8

    in_loop(check)


def test_without_snapshots_the_router_would_expect_too_much(monkeypatch):
    """The test before can fail: blocks alone promise what no engine can use."""
    monkeypatch.setattr(PrefixIndex, "restorable", lambda *given: given[-1])

    def check():
        pairs = list(conversation())
        assert any(cached < predicted for cached, predicted in pairs)

    in_loop(check)


def test_another_front_end_and_a_cleared_cache_agree():
    def check():
        hybrid, prompt = Hybrid(), [*text(192, 1), 1]
        assert hybrid.answer(prompt) == (0, 0)
        hybrid.feed.flush()
        assert hybrid.predicted(prompt) == 192
        # A common beginning has blocks, but no snapshot.
        assert hybrid.predicted([*prompt[:128], *text(64, 2), 1]) == 0
        first, hybrid.router = hybrid.router, Router()
        hybrid.router.add(0, 4, 1 << 20)
        hybrid.news = PrefixNews(hybrid.router, Counter())
        hybrid.feed.follow(hybrid, hybrid.receive)
        assert hybrid.predicted(prompt) == 192
        assert first.choose(keys_of(prompt), len(prompt))[1] == 192
        hybrid.core.reset_prefix_cache()
        hybrid.feed.flush()
        assert hybrid.predicted(prompt) == 0

    in_loop(check)


def test_a_prompt_on_its_way_counts_until_the_engine_has_told_of_it():
    index, keys = PrefixIndex(), keys_of(text(192, 1))
    index.open(0, 100)
    index.report_states(0, ())
    index.add(0, keys)
    assert index.blocks_of(0, keys) == 3
    index.report(0, keys)
    assert index.blocks_of(0, keys) == 0
    index.report_states(0, keys[1:2])
    assert index.blocks_of(0, keys) == 2


def test_engines_of_an_older_version_say_nothing_of_state():
    fields = ["prefixes", 3, True, [b"", b"", b""], b"", []]
    assert decode(msgspec.msgpack.encode(fields)).states is None
