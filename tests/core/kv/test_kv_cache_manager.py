"""Shared, delayed and windowed blocks of the KV cache manager."""

from __future__ import annotations

from inl.kv.block_pool import BlockPool
from inl.kv.kv_cache_manager import KVCacheManager
from inl.kv.kv_events import BlocksCleared, BlocksRemoved


def manager(*blocks):
    return KVCacheManager([BlockPool(count, 4) for count in blocks])


def test_blocks_wait_for_the_newest_step_that_may_touch_them():
    cache = manager(4)
    table, _ = cache.admit([], 3, spare=0)
    cache.release(table, 2)
    assert (cache.available_blocks, cache.has_pending_frees) == (0, True)
    cache.complete_step(1)
    assert (cache.available_blocks, cache.has_pending_frees) == (0, True)
    cache.complete_step(2)
    assert (cache.available_blocks, cache.has_pending_frees) == (3, False)


def test_blocks_without_steps_in_flight_are_freed_immediately():
    cache = manager(4)
    cache.complete_step(5)
    table, _ = cache.admit([], 3, spare=0)
    cache.release(table, 5)
    assert (cache.available_blocks, cache.has_pending_frees) == (3, False)


def test_a_shared_block_is_freed_after_its_last_reference():
    cache = manager(5)
    first, _ = cache.admit([], 2, spare=0)
    cache.publish(first, 0, b"a")
    second, hits = cache.admit([b"a", b"ab"], 2, spare=0)
    assert (hits, second[0][0], cache.available_blocks) == (1, first[0][0], 1)
    cache.release(first, 1)
    cache.release(second, 2)
    cache.complete_step(1)
    assert cache.available_blocks == 2
    cache.complete_step(2)
    assert cache.available_blocks == 4


def test_a_prefix_is_shared_only_if_every_group_has_it():
    cache = manager(5, 3)
    table, _ = cache.admit([], 2, spare=0)
    cache.publish(table, 0, b"a")
    cache.publish(table, 1, b"ab")
    cache.release(table, 0)
    # Only the second group is short of blocks, so only it evicts one.
    other, _ = cache.admit([], 1, spare=0)
    assert cache.pools[0].find(b"ab") is not None
    assert cache.pools[1].find(b"ab") is None
    cache.release(other, 0)
    assert cache.admit([b"a", b"ab"], 2, spare=0)[1] == 1


def test_a_failed_admission_allocates_nothing():
    cache = manager(4)
    table, _ = cache.admit([], 1, spare=0)
    cache.publish(table, 0, b"a")
    cache.release(table, 0)
    assert cache.admit([b"a"], 4, spare=0) is None
    assert cache.admit([b"a"], 3, spare=1) is None
    assert (cache.available_blocks, cache.pools[0].ref_count(table[0][0])) == (3, 0)
    assert cache.admit([b"a"], 3, spare=0)[1] == 1


def test_all_groups_grow_or_none():
    cache = manager(4, 3)
    table, _ = cache.admit([], 1, spare=0)
    assert cache.grow(table)
    assert not cache.grow(table)
    assert [len(blocks) for blocks in table] == [2, 2]
    assert cache.pools[0].available_blocks == 1


def test_a_windowed_group_needs_only_blocks_in_its_window():
    keys = [bytes([index]) for index in range(6)]
    cache = KVCacheManager([BlockPool(12, 4), BlockPool(12, 4)], (None, 5))
    table, _ = cache.admit([], 6, spare=0)
    for index, key in enumerate(keys):
        cache.publish(table, index, key)
    cache.release(table, 0)
    # Blocks 0 to 3 of the group with the window are evicted.
    gone = [cache.pools[1].allocate() for _ in range(9)]
    assert [cache.pools[1].find(key) is None for key in keys] == [False] * 2 + [
        True
    ] * 4
    for block in gone:
        cache.pools[1].free([block])
    found, hits = cache.admit(keys, 6, spare=0)
    assert hits == 2
    assert [bool(block) for block in found[1]] == [False] + [True] * 5


def test_blocks_before_the_window_are_not_needed_for_a_prefix():
    keys = [bytes([index]) for index in range(6)]
    cache = KVCacheManager([BlockPool(20, 4), BlockPool(20, 4)], (None, 5))
    table, _ = cache.admit([], 6, spare=0)
    for index, key in enumerate(keys):
        cache.publish(table, index, key)
    first, table[1][:4] = table[1][:4], [0] * 4
    cache.release([[], first], 0)
    cache.release(table, 0)
    taken = [cache.pools[1].allocate() for _ in range(13 + 4)]
    assert [cache.pools[1].find(key) is None for key in keys] == [True] * 4 + [
        False
    ] * 2
    cache.pools[1].free(taken)
    found, hits = cache.admit(keys, 8, spare=0)
    assert hits == 6
    assert [block == 0 for block in found[1]] == [True] * 5 + [False] * 3
    assert 0 not in found[0]


class Stored:
    """A tier that has some blocks."""

    def __init__(self, *keys):
        self.keys = set(keys)

    def holds(self, _, key):
        return key in self.keys

    def is_worth(self, *_):
        return True

    def fetch(self, _):
        return True


def test_events_are_those_of_the_group_that_sees_all_tokens():
    pools = [BlockPool(9, 4), BlockPool(3, 4)]
    cache, found = KVCacheManager(pools, [4, None]), []
    cache.report(found.append)
    table, _ = cache.admit([], 2, spare=0)
    assert [cache.publish(table, at, key) for at, key in enumerate([b"a", b"b"])] == [
        True, True,
    ]  # fmt: skip
    assert not cache.publish(table, 0, b"a")
    cache.release(table, 0)
    cache.admit([], 1, spare=0)
    assert found == [BlocksRemoved((b"b",))], "once, though both groups evict one"
    cache.forget()
    assert found[1:] == [BlocksCleared()]


def test_blocks_from_a_tier_can_be_reported_once_they_are_admitted():
    cache = KVCacheManager([BlockPool(4, 4)], tier=Stored(b"a", b"b"))
    found = []
    cache.report(found.append)
    table, hits = cache.admit([b"a", b"b"], 3, spare=0)
    assert (hits, list(cache.last_loaded)) == (2, [0, 1])
    cache.release(table, 0)
    cache.admit([b"a", b"b"], 3, spare=0)
    assert list(cache.last_loaded) == []
    assert not found
