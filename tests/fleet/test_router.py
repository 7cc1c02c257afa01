"""The prefix index against a plain one, and the choices of the router."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

import pytest

from depth import SEED
from inl.fleet.prefix_index import BLOCK_TOKENS, PrefixIndex, block_keys, root_of
from inl.fleet.router import Router


@pytest.fixture
def random():
    return Random(SEED)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make_router(clock, replicas, *, places=8, **options):
    router = Router(clock=clock, **options)
    for replica in range(replicas):
        router.add(replica, places, 100 * BLOCK_TOKENS)
    return router


def tokens_of(draw, blocks, systems):
    """Return a prompt that begins as others do."""
    prompt = list(systems[draw.randrange(len(systems))])
    return prompt + [draw.randrange(9) for _ in range(blocks * BLOCK_TOKENS)]


def test_keys_depend_on_all_tokens_before_and_on_the_salt():
    one = list(range(3 * BLOCK_TOKENS + 5))
    other = [one[0] + 1, *one[1:]]
    assert len(block_keys(one)) == 3
    assert block_keys(one)[:2] == block_keys(one[: 2 * BLOCK_TOKENS])
    assert not set(block_keys(one)) & set(block_keys(other))
    assert not set(block_keys(one)) & set(block_keys(one, root_of("", "tenant")))


def test_the_index_is_that_of_a_plain_cache_of_each_replica(random):
    """Against one ordered list a replica, walked block by block."""
    capacity, replicas = 12, 5
    index = PrefixIndex()
    plain = {replica: OrderedDict() for replica in range(replicas)}
    for replica in plain:
        index.open(replica, capacity)
    systems = [[n] * BLOCK_TOKENS * (n + 1) for n in range(3)]
    for _ in range(400):
        keys = block_keys(tokens_of(random, random.randrange(4), systems))
        for replica, cache in plain.items():
            known = 0
            while known < len(keys) and keys[known] in cache:
                known += 1
            assert index.blocks_of(replica, keys) == known
        replica = random.randrange(replicas)
        index.add(replica, keys)
        for key in reversed(keys[:capacity]):
            plain[replica][key] = None
            plain[replica].move_to_end(key)
        while len(plain[replica]) > capacity:
            plain[replica].popitem(last=False)
        assert len(index) == sum(map(len, plain.values()))
    for replica in plain:
        index.close(replica)
    assert not len(index)
    assert not index._holders


def test_the_index_is_bounded(random):
    index = PrefixIndex(max_blocks=50)
    for replica in range(10):
        index.open(replica, 40)
    for _ in range(200):
        index.add(random.randrange(10), block_keys(tokens_of(random, 6, [[]])))
        assert len(index) <= 50


def test_a_prompt_goes_where_its_prefix_is(clock, random):
    for replicas in (4, 300):
        router = make_router(clock, replicas)
        prompt = tokens_of(random, 20, [[]])
        keys = block_keys(prompt)
        first = router.choose(keys, len(prompt))
        router.end(router.begin(first[0], keys, len(prompt), 0))
        longer = [*prompt, *range(100)]
        found = router.choose(block_keys(longer), len(longer))
        assert found == (first[0], len(prompt))


def test_a_popular_prefix_spreads_before_one_replica_is_overloaded(clock, random):
    router = make_router(clock, 50)
    prompt = tokens_of(random, 20, [[]])
    keys = block_keys(prompt)
    for _ in range(200):
        replica, cached = router.choose(keys, len(prompt))
        assignment = router.begin(replica, keys, len(prompt), cached)
        clock.now += 0.001
        router.record_first(assignment, cached)
    opened = [load.open for load in router.loads.values()]
    assert sum(opened) == 200
    assert max(opened) <= 10
    assert router.cached_tokens > 0.5 * router.prompt_tokens


def test_slow_replicas_get_less(clock, random):
    router = make_router(clock, 4, places=64)
    counts = dict.fromkeys(range(4), 0)
    waiting = []
    for _ in range(600):
        prompt = tokens_of(random, 10, [[]])
        keys = block_keys(prompt)
        replica, cached = router.choose(keys, len(prompt))
        counts[replica] += 1
        seconds = len(prompt) * (4e-4 if replica == 3 else 1e-4)
        assignment = router.begin(replica, keys, len(prompt), cached)
        waiting.append((clock.now + seconds, assignment))
        clock.now += 0.02
        for due in [each for each in waiting if each[0] <= clock.now]:
            waiting.remove(due)
            router.record_first(due[1], 0)
            router.end(due[1])
    assert counts[3] < 0.6 * min(counts[each] for each in range(3))


def served(router, clock, replica, seconds):
    """Let a replica compute one prompt of 100 tokens."""
    assignment = router.begin(replica, [], 100, 0)
    clock.now += seconds
    router.record_first(assignment, 0)
    router.end(assignment)


def test_a_replica_that_is_often_late_is_slow_though_its_usual_time_is_not(clock):
    router = make_router(clock, 4, places=64)
    for number in range(64):
        for replica in range(4):
            is_late = replica == 2 and number % 6 == 0
            served(router, clock, replica, 0.5 if is_late else 0.01)
        changed = router.notice_slow()
        assert changed == ([2] if number == 7 else [])
    loads = router.loads
    assert loads[2].slowness > 10
    assert [loads[each].slowness for each in (0, 1, 3)] == [1.0] * 3
    # Its last times were usual ones, so its average is nearly that of the others.
    assert loads[2].seconds_per_token < 10 * loads[0].seconds_per_token
    chosen = []
    for _ in range(60):
        replica, _ = router.choose([], 100)
        chosen.append(router.begin(replica, [], 100, 0))
    counts = [sum(each.replica == replica for each in chosen) for replica in range(4)]
    assert counts[2] < 0.3 * min(counts[each] for each in (0, 1, 3))
    for each in chosen:
        router.end(each)
    for _ in range(32):
        served(router, clock, 2, 0.01)
    assert router.notice_slow() == [2]
    assert loads[2].slowness == 1.0


def test_two_replicas_are_not_compared(clock):
    router = make_router(clock, 2)
    for _ in range(20):
        served(router, clock, 0, 0.01)
        served(router, clock, 1, 1.0)
    assert router.notice_slow() == []


def test_a_replica_that_answers_nothing_is_noticed_before_it_answers(clock):
    router = make_router(clock, 2)
    for replica in (0, 1):
        assignment = router.begin(replica, [], 100, 0)
        clock.now += 0.1
        router.record_first(assignment, 0)
        router.end(assignment)
    router.begin(0, [], 100, 0)
    clock.now += 5
    before = router.loads[0].seconds_per_token
    router.notice_slow()
    assert router.loads[0].seconds_per_token > 10 * before
    assert router.choose([], 100)[0] == 1


def test_replicas_that_cannot_be_used_are_never_chosen(clock, random):
    router = make_router(clock, 30)
    usable = set(range(30))
    for _ in range(300):
        replica = random.randrange(30)
        if replica in router.loads:
            is_usable = random.random() < 0.5
            router.set_usable(replica, is_usable)
            (usable.add if is_usable else usable.discard)(replica)
        if random.random() < 0.05 and replica in router.loads:
            router.remove(replica)
            usable.discard(replica)
        keys = block_keys(tokens_of(random, 3, [[1] * BLOCK_TOKENS]))
        refused = {each for each in usable if random.random() < 0.3}
        choice = router.choose(keys, 200, refused)
        if choice is None:
            assert usable <= refused
            continue
        assert choice[0] in usable - refused
        router.begin(choice[0], keys, 200, choice[1])
    assert router._open == sum(load.open for load in router.loads.values())
