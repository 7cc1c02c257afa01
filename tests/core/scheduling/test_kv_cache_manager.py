"""The settle rule: what a step in flight may touch is nobody else's."""

from __future__ import annotations

from inl.scheduling.block_pool import BlockPool
from inl.scheduling.kv_cache_manager import KVCacheManager


def memory(*blocks):
    return KVCacheManager([BlockPool(count, 4) for count in blocks])


def test_blocks_wait_for_the_newest_step_that_may_touch_them():
    held = memory(4)
    table, _ = held.admit([], 3, spare=0)
    held.release(table, 2)
    assert (held.available_blocks, held.has_pending_frees) == (0, True)
    held.complete_step(1)
    assert (held.available_blocks, held.has_pending_frees) == (0, True)
    held.complete_step(2)
    assert (held.available_blocks, held.has_pending_frees) == (3, False)


def test_blocks_that_no_step_in_flight_touches_are_free_at_once():
    held = memory(4)
    held.complete_step(5)
    table, _ = held.admit([], 3, spare=0)
    held.release(table, 5)
    assert (held.available_blocks, held.has_pending_frees) == (3, False)


def test_a_shared_block_waits_for_each_of_its_holders():
    held = memory(5)
    first, _ = held.admit([], 2, spare=0)
    held.publish(first, 0, b"a")
    second, hits = held.admit([b"a", b"ab"], 2, spare=0)
    assert (hits, second[0][0], held.available_blocks) == (1, first[0][0], 1)
    held.release(first, 1)
    held.release(second, 2)
    held.complete_step(1)
    assert held.available_blocks == 2
    held.complete_step(2)
    assert held.available_blocks == 4


def test_a_prefix_counts_only_where_every_group_has_it():
    held = memory(5, 3)
    table, _ = held.admit([], 2, spare=0)
    held.publish(table, 0, b"a")
    held.publish(table, 1, b"ab")
    held.release(table, 0)
    # One block is evicted from the second group, the only one that is short of them.
    other, _ = held.admit([], 1, spare=0)
    assert held.pools[0].find(b"ab") is not None
    assert held.pools[1].find(b"ab") is None
    held.release(other, 0)
    assert held.admit([b"a", b"ab"], 2, spare=0)[1] == 1


def test_what_does_not_fit_takes_nothing():
    held = memory(4)
    table, _ = held.admit([], 1, spare=0)
    held.publish(table, 0, b"a")
    held.release(table, 0)
    assert held.admit([b"a"], 4, spare=0) is None
    assert held.admit([b"a"], 3, spare=1) is None
    assert (held.available_blocks, held.pools[0].ref_count(table[0][0])) == (3, 0)
    assert held.admit([b"a"], 3, spare=0)[1] == 1


def test_growth_is_the_same_in_every_group_or_none():
    held = memory(4, 3)
    table, _ = held.admit([], 1, spare=0)
    assert held.grow(table)
    assert not held.grow(table)
    assert [len(blocks) for blocks in table] == [2, 2]
    assert held.pools[0].available_blocks == 1


def test_a_window_asks_only_for_the_blocks_that_it_shows():
    keys = [bytes([index]) for index in range(6)]
    held = KVCacheManager([BlockPool(12, 4), BlockPool(12, 4)], (None, 5))
    table, _ = held.admit([], 6, spare=0)
    for index, key in enumerate(keys):
        held.publish(table, index, key)
    held.release(table, 0)
    # Blocks 0 to 3 of the group with the window are evicted.
    gone = [held.pools[1].allocate() for _ in range(9)]
    assert [held.pools[1].find(key) is None for key in keys] == [False] * 2 + [True] * 4
    for block in gone:
        held.pools[1].free([block])
    found, hits = held.admit(keys, 6, spare=0)
    assert hits == 2
    assert [bool(block) for block in found[1]] == [False] + [True] * 5


def test_what_a_window_has_passed_is_not_needed_for_a_prefix():
    keys = [bytes([index]) for index in range(6)]
    held = KVCacheManager([BlockPool(20, 4), BlockPool(20, 4)], (None, 5))
    table, _ = held.admit([], 6, spare=0)
    for index, key in enumerate(keys):
        held.publish(table, index, key)
    first, table[1][:4] = table[1][:4], [0] * 4
    held.release([[], first], 0)
    held.release(table, 0)
    taken = [held.pools[1].allocate() for _ in range(13 + 4)]
    assert [held.pools[1].find(key) is None for key in keys] == [True] * 4 + [False] * 2
    held.pools[1].free(taken)
    found, hits = held.admit(keys, 8, spare=0)
    assert hits == 6
    assert [block == 0 for block in found[1]] == [True] * 5 + [False] * 3
    assert 0 not in found[0]
