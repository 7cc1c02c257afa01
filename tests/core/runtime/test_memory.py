"""The settle rule: what a step in flight may touch is nobody else's."""

from __future__ import annotations

from inl.runtime.blocks import BlockPool
from inl.runtime.memory import Memory


def memory(*blocks):
    return Memory([BlockPool(count, 4) for count in blocks])


def test_blocks_wait_for_the_newest_step_that_may_touch_them():
    held = memory(4)
    table, _ = held.admit([], 3, spare=0)
    held.release(table, 2)
    assert (held.available_blocks, held.settling) == (0, True)
    held.settle(1)
    assert (held.available_blocks, held.settling) == (0, True)
    held.settle(2)
    assert (held.available_blocks, held.settling) == (3, False)


def test_blocks_that_no_step_in_flight_touches_are_free_at_once():
    held = memory(4)
    held.settle(5)
    table, _ = held.admit([], 3, spare=0)
    held.release(table, 5)
    assert (held.available_blocks, held.settling) == (3, False)


def test_a_shared_block_waits_for_each_of_its_holders():
    held = memory(5)
    first, _ = held.admit([], 2, spare=0)
    held.publish(first, 0, b"a")
    second, hits = held.admit([b"a", b"ab"], 2, spare=0)
    assert (hits, second[0][0], held.available_blocks) == (1, first[0][0], 1)
    held.release(first, 1)
    held.release(second, 2)
    held.settle(1)
    assert held.available_blocks == 2
    held.settle(2)
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
    assert (held.available_blocks, held.pools[0].references(table[0][0])) == (3, 0)
    assert held.admit([b"a"], 3, spare=0)[1] == 1


def test_growth_is_the_same_in_every_group_or_none():
    held = memory(4, 3)
    table, _ = held.admit([], 1, spare=0)
    assert held.grow(table)
    assert not held.grow(table)
    assert [len(blocks) for blocks in table] == [2, 2]
    assert held.pools[0].available_blocks == 1
