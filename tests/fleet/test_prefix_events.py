"""What front-ends know of the blocks of engines: events, gaps, tiers and adapters."""

from __future__ import annotations

import asyncio
import random as draws
from array import array
from types import SimpleNamespace

import pytest

from depth import SEED, scaled
from fleets import TEXT, Fleet, HeldEngine
from http_servers import hash_engine
from inl.config import EngineConfig
from inl.engine.records import BlocksStored
from inl.fleet.block_feed import BlockFeed
from inl.fleet.client import FleetClient
from inl.fleet.engine_link import EngineLink
from inl.fleet.engine_port import _FrontEndLink
from inl.fleet.prefix_index import BLOCK_TOKENS, LEVELS, block_keys, root_of
from inl.fleet.router import ASSUMED_TIER_COSTS, Router
from inl.kv.block_hash import extend_block_hashes, root_hash
from inl.serve.frontends.messages import ModelSettings, Prefixes, Replica
from inl.serve.settings import ServerConfig
from waiting import until

BLOCK = 16
"""Tokens of a block of the engines."""


class TieredEngine(HeldEngine):
    """An engine on hashes with tiers; loading always pays."""

    def __init__(self, folder=None, **options):
        super().__init__(max_batch=1, **options)
        self._folder = folder

    def _open(self, on_step):
        # A block on hashes has 16 numbers of 8 bytes.
        disk = f"1MiB:{self._folder}" if self._folder else None
        config = EngineConfig(max_batch=1, kv_host="8KiB", kv_disk=disk)
        self.engine = hash_engine(1, config=config, on_step=on_step)
        self.engine.tiers.costs.pays = lambda *_: True
        return self.engine


def level_of(engine, key):
    """Return where an engine has one of its own blocks, asked directly."""
    (pool,) = engine.core.scheduler.kv_cache.pools
    if pool.find(key) is not None:
        return 0
    tiers = engine.tiers
    if tiers is None or not tiers.holds(0, key):
        return None
    return 1 if (0, key) in tiers.host else 2


def true_levels(engine, tokens):
    """Return the level of each block of 64 tokens, by the engine's own digests."""
    digest = engine.core.config.model_digest
    count = len(tokens) // BLOCK
    hashes = [
        root_hash(
            model_digest=digest, adapter_digest="", cache_salt="", block_size=BLOCK
        )
    ]
    extend_block_hashes(hashes, tokens, BLOCK, count)
    each = BLOCK_TOKENS // BLOCK
    return [level_of(engine, key) for key in hashes[1:][each - 1 :: each]]


def known_levels(fleet, tokens):
    """Return the levels that a front-end has been told of."""
    index, number = fleet.client.router.index, fleet.client.engines[0].number
    reported = index._reported[number]
    return [
        index._holders[key][number] if key in reported else None
        for key in block_keys(tokens, root_of("", ""))
    ]


def ask(fleet, prompt, count=20):
    body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True}
    status, _, found = fleet.send("POST", TEXT, {**body, "return_token_ids": True})
    assert status == 200, found
    return [*prompt, *found["choices"][0]["token_ids"]]


def agrees(fleet, engine, texts):
    return all(
        known_levels(fleet, tokens) == true_levels(engine, tokens) for tokens in texts
    )


def random_texts(fleet, engine, count):
    """Yield all texts so far after each of some requests, once the index agrees."""
    draw, texts = draws.Random(SEED), []
    for _ in range(count):
        prompt = list(draw.choice(texts) if texts and draw.random() < 0.6 else ())
        prompt = prompt[: draw.randrange(len(prompt) + 1)][:500]
        prompt += [draw.randrange(1000) for _ in range(draw.randrange(1, 400))]
        texts.append(ask(fleet, prompt))
        until(lambda: agrees(fleet, engine, texts))
        yield texts


def test_a_front_end_knows_what_an_engine_has_answers_included(tmp_path):
    seen = set()
    with TieredEngine(tmp_path / "blocks") as one, Fleet([one.address]) as fleet:
        for texts in random_texts(fleet, one.engine, scaled(12, 40)):
            seen |= {lev for text in texts for lev in true_levels(one.engine, text)}
        assert seen >= {0, 1, 2}, "blocks were evicted to both tiers"
        # Answers are counted as well: they end behind their prompts.
        number = fleet.client.engines[0].number
        depth = fleet.client.router.index.blocks_of(
            number, block_keys(texts[-1], root_of("", ""))
        )
        assert depth == len(texts[-1][:-1]) // BLOCK_TOKENS
        # The cost of reading is what the engine has measured.
        for text in texts:
            if {1, 2} & set(true_levels(one.engine, text)):
                ask(fleet, text, 1)
        until(lambda: measured(fleet) == costs_of(one.engine) or again(fleet))
        # Another front-end gets all of them at once.
        with Fleet([one.address]) as other:
            until(lambda: agrees(other, one.engine, texts))
        one.engine.reset_prefix_cache()
        until(lambda: agrees(fleet, one.engine, texts))
        assert not fleet.client.router.index._reported[number]
        assert not fleet.client.counts["prefix_gaps"]


def costs_of(engine):
    """Return the time to read a block of each tier by that to compute it."""
    costs = engine.tiers.costs
    assert costs._block_seconds, "some were read"
    pairs = zip(LEVELS[1:], ASSUMED_TIER_COSTS, strict=True)
    return [
        costs._block_seconds[name] / (costs._token_seconds * BLOCK)
        if name in costs._block_seconds
        else assumed
        for name, assumed in pairs
    ]


def measured(fleet):
    number = fleet.client.engines[0].number
    return fleet.client.router.loads[number].tier_costs


def again(fleet):
    """Let an engine tell its costs again, which every step changes a little."""
    fleet._loop.call_soon_threadsafe(fleet.client.engines[0].follow)


def lossy(monkeypatch, lost):
    """Lose some messages of an engine to its front-end, which it has numbered."""
    sent = []

    def send(link, message):
        sent.append(message)
        if len(sent) - 1 not in lost:
            SEND(link, message)

    monkeypatch.setattr(_FrontEndLink, "_send_prefixes", send)
    return sent


SEND = _FrontEndLink._send_prefixes


def test_a_gap_is_noticed_and_all_blocks_are_sent_again(monkeypatch, caplog):
    sent = lossy(monkeypatch, {2, 3})
    with HeldEngine(max_batch=1) as one, Fleet([one.address]) as fleet:
        texts = texts_of(fleet, sent)
        until(lambda: agrees(fleet, one.engine, texts))
        assert fleet.client.counts["prefix_gaps"] == 1
        (line,) = [each for each in caplog.messages if "of what its cache has" in each]
        assert line.startswith(f"engine {one.address}: missed 2 messages")
        text = fleet.send("GET", "/metrics")[2].decode()
        assert "inl:fleet_prefix_gaps_total" in text


def texts_of(fleet, sent):
    """Ask until an engine has sent more messages than those that are lost."""
    texts = []
    while len(sent) < 6:
        texts.append(ask(fleet, [len(texts)] * 150))
    return texts


def test_without_sequence_numbers_the_index_would_be_wrong(monkeypatch):
    """The test before can fail: gaps that nobody notices leave blocks unknown."""
    sent = lossy(monkeypatch, {2, 3})
    monkeypatch.setattr(EngineLink, "follow", lambda link: follow_once(link))
    followed = set()

    def follow_once(link):
        if link.number not in followed:
            followed.add(link.number)
            FOLLOW(link)

    with HeldEngine(max_batch=1) as one, Fleet([one.address]) as fleet:
        texts = texts_of(fleet, sent)
        until(lambda: fleet.client.counts["prefix_gaps"])
        assert not agrees(fleet, one.engine, texts)


FOLLOW = EngineLink.follow


def test_engines_of_version_1_are_asked_for_nothing(monkeypatch):
    monkeypatch.setattr("inl.fleet.proofs.VERSION", 1)
    with HeldEngine(max_batch=1) as one, Fleet([one.address]) as fleet:
        text = ask(fleet, [7] * 300)
        number = fleet.client.engines[0].number
        index = fleet.client.router.index
        assert not index._reported[number]
        # The prompt is known, as predicted.
        assert index.blocks_of(number, block_keys(text, root_of("", ""))) == 4


@pytest.mark.parametrize("size", [8, 16, 32, 48, 64, 128])
def test_blocks_of_any_size_become_keys_of_the_index(size):
    """A feed of an engine that a test plays; each block in an event of its own."""
    engine = SimpleNamespace(
        tiers=None, snapshots=None, report_kv_events=lambda tell: told.append(tell)
    )
    told, sent, calls = [], [], []
    loop = SimpleNamespace(call_soon_threadsafe=calls.append)
    feed = BlockFeed.__new__(BlockFeed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncio.get_running_loop", lambda: loop)
        feed.__init__(engine)
    feed.follow("front-end", sent.append)
    tokens = list(range(size * 12))
    for at in range(12):
        parent = bytes([at - 1]) * 32 if at else None
        part = tokens[at * size : (at + 1) * size]
        told[0](BlocksStored([bytes([at]) * 32], parent, part, size, "adapter"))
    assert len(calls) == 1, "one wake-up for all of them"
    feed.flush()
    found = array("Q")
    found.frombytes(sent[-1].levels[0])
    assert list(found) == block_keys(tokens, root_of("adapter", ""))
    assert sent[0] == Prefixes(0, True, [b""] * 3, b"", ())
    assert sent[-1].number == 1


# The router.


def router_of(count, **options):
    router = Router(seed=SEED)
    for replica in range(count):
        router.add(replica, 8, 1000 * BLOCK_TOKENS, **options)
    return router


@pytest.mark.parametrize("level", [1, 2])
def test_a_tier_counts_with_the_cost_of_reading_it(level):
    router = router_of(2)
    prompt = list(range(20 * BLOCK_TOKENS))
    keys = block_keys(prompt)
    # The first one has all of it in a tier, the other one half of it on its device.
    router.report(0, [[], keys, []] if level == 1 else [[], [], keys])
    router.report(1, [keys[:10], [], []])
    costs = [2.0, 2.0]
    for cost, chosen in ((0.1, 0), (0.45, 0), (0.55, 1), (1.5, 1)):
        costs[level - 1] = cost
        router.loads[0].tier_costs = tuple(costs)
        replica, saved = router.choose(keys, len(prompt) + 1)
        assert replica == chosen, cost
        whole = len(keys) * BLOCK_TOKENS
        assert saved == (int(whole * (1 - cost)) if chosen == 0 else whole // 2)


def test_a_cost_that_is_not_measured_yet_is_assumed():
    client = FleetClient(ServerConfig())
    client.router.add(1, 8, 1000 * BLOCK_TOKENS)
    engine = SimpleNamespace(number=1)
    load = client.router.loads[1]
    for costs, found in (
        ((), ASSUMED_TIER_COSTS),
        ((0.0, 0.3), [ASSUMED_TIER_COSTS[0], 0.3]),
        ((0.1, 0.3), [0.1, 0.3]),
    ):
        client.received(engine, Prefixes(0, True, [b""] * 3, b"", costs))
        assert load.tier_costs == found


def test_a_device_counts_more_than_tiers_and_tiers_more_than_nothing():
    router = router_of(4)
    prompt = list(range(20 * BLOCK_TOKENS))
    keys = block_keys(prompt)
    for replica, levels in enumerate(
        ([keys, [], []], [[], keys, []], [[], [], keys], [[], [], []])
    ):
        router.report(replica, levels)
    order = []
    while (choice := router.choose(keys, len(prompt) + 1, order)) is not None:
        order.append(choice[0])
    assert order == [0, 1, 2, 3]
    mixed = [keys[:4], keys[4:12], keys[12:]]
    router.report(3, mixed)
    assert router.index.below_device(3, keys, 20) == [8, 8]
    saved = router.choose(keys, len(prompt) + 1, order[:3])[1]
    host, disk = ASSUMED_TIER_COSTS
    assert saved == len(prompt) - int(8 * BLOCK_TOKENS * (host + disk))
    # What moves to the device is below it no more.
    router.index.report(3, keys, 0)
    assert router.index.below_device(3, keys, 20) == (0, 0)


def test_a_report_and_predictions_are_counted_once():
    router, draw = router_of(3), draws.Random(SEED)
    index = router.index
    texts = [[draw.randrange(9)] * BLOCK_TOKENS * 4 for _ in range(30)]
    for _ in range(3000):
        replica, keys = draw.randrange(3), block_keys(draw.choice(texts))
        match draw.randrange(5):
            case 0:
                index.add(replica, keys)
            case 1:
                index.report(replica, keys, draw.randrange(len(LEVELS)))
            case 2:
                index.withdraw(replica, keys[draw.randrange(4) :])
            case 3:
                router.report(replica, [[], keys, []])
            case 4:
                index.clear(replica)
        held = [
            (replica, level)
            for holders in index._holders.values()
            for replica, level in holders.items()
        ]
        assert len(index) == len(held)
        for each in range(3):
            below = sum(level > 0 for replica, level in held if replica == each)
            assert index._below.get(each, 0) == below
            blocks, reported = index._blocks[each], index._reported[each]
            assert not blocks.keys() & reported.keys()
            assert len(blocks) + len(reported) == sum(r == each for r, _ in held)


def test_requests_of_an_adapter_go_to_replicas_that_have_it():
    draw = draws.Random(SEED)
    for count in (4, 300):
        router = router_of(count)
        having = set(draw.sample(range(count), max(count // 10, 1)))
        for replica in having:
            router.remove(replica)
            router.add(replica, 8, 1000 * BLOCK_TOKENS, ["poet"])
        prompt = list(range(5 * BLOCK_TOKENS))
        keys = block_keys(prompt)
        # Others have its blocks as well: of another digest, they would not.
        for replica in range(count):
            router.index.add(replica, keys)
        chosen = set()
        for _ in range(40):
            replica, cached = router.choose(keys, len(prompt), adapter="poet")
            router.begin(replica, keys, len(prompt), cached)
            chosen.add(replica)
        assert chosen <= having
        assert len(chosen) > 1 or len(having) == 1
        assert router.choose(keys, len(prompt), adapter="clerk") is None
        for replica in having:
            router.set_usable(replica, False)
        assert router.choose(keys, len(prompt), adapter="poet") is None
        assert router.choose(keys, len(prompt)) is not None


def replica_of(adapters):
    """Return what an engine with adapters says of itself; digests by name."""
    model = ModelSettings("m", tuple(adapters), None, 1024)
    identity = {"model": "m", **{f"adapter {n}": d for n, d in adapters.items()}}
    return Replica(b"", [model], identity, "cpu:0", 4, 4096, 1024, {}, [0])


async def _opened(client, port, adapters):
    engine = EngineLink(f"127.0.0.1:{port}", None, client)
    engine.send = lambda message: None
    client.engines.append(engine)
    engine._open(replica_of(adapters))
    return engine


def test_engines_may_have_different_adapters_but_no_two_of_a_name():

    async def check():
        client = FleetClient(ServerConfig())
        plain = await _opened(client, 1, {})
        poet = await _opened(client, 2, {"poet": "a"})
        both = await _opened(client, 3, {"poet": "a", "clerk": "b"})
        other = await _opened(client, 4, {"poet": "c"})
        states = [each.state.value for each in (plain, poet, both, other)]
        assert states == ["ready"] * 3 + ["refused"]
        assert "adapter poet: c, the fleet's: a" in other.reason
        assert list(client.names) == ["m", "poet", "clerk"]
        assert client.router.choose([], 1, adapter="clerk")[0] == both.number
        ids = [client.identity_of(name) for name in (None, "m", "poet", "clerk")]
        assert ids[0] == ids[1]
        assert len(set(ids)) == 3

    asyncio.run(check())
