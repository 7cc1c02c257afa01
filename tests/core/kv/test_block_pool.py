from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.kv.block_pool import BlockPool

OPERATIONS = ["take", "share", "free", "publish"]


def taken(pool, count):
    return [pool.allocate() for _ in range(count)]


def test_block_zero_is_not_allocated():
    pool = BlockPool(4, 2)
    assert sorted(taken(pool, 3)) == [1, 2, 3]
    assert pool.available_blocks == 0


def test_a_published_block_is_shared_while_used_and_after():
    pool = BlockPool(4, 2)
    block = pool.allocate()
    pool.publish(block, b"key")
    assert pool.share(b"key") == block
    assert pool.ref_count(block) == 2
    pool.free([block])
    pool.free([block])
    assert (pool.used_blocks, pool.cached_blocks, pool.available_blocks) == (0, 1, 3)
    assert pool.share(b"key") == block
    assert (pool.used_blocks, pool.cached_blocks) == (1, 0)


def test_free_blocks_are_allocated_before_cached_ones():
    pool = BlockPool(4, 2)
    block = pool.allocate()
    pool.publish(block, b"key")
    pool.free([block])
    assert block not in taken(pool, 2)
    assert pool.find(b"key") == block
    assert pool.allocate() == block
    assert pool.find(b"key") is None


@pytest.mark.parametrize("count", range(5))
def test_allocate_many_equals_repeated_allocate(count):
    pools = []
    for _ in range(2):
        pool = BlockPool(5, 2)
        first, second, third = taken(pool, 3)
        for block, key in ((second, b"second"), (first, b"first")):
            pool.publish(block, key)
        pool.free([first, third, second])
        pools.append(pool)
    many, one_by_one = pools
    assert many.allocate_many(count) == taken(one_by_one, count)
    assert many.available_blocks == one_by_one.available_blocks
    for key in (b"first", b"second"):
        assert many.find(key) == one_by_one.find(key)
    with pytest.raises(AssertionError, match="available_blocks"):
        many.allocate_many(5 - count)


def test_suffixes_are_evicted_before_their_prefix():
    pool = BlockPool(4, 2)
    blocks = taken(pool, 3)
    for block, key in zip(blocks, (b"a", b"ab", b"abc"), strict=True):
        pool.publish(block, key)
    pool.free(blocks)
    assert taken(pool, 2) == [blocks[2], blocks[1]]
    assert pool.find(b"a") == blocks[0]


def test_the_least_recently_used_is_evicted_first():
    pool = BlockPool(3, 2)
    first, second = taken(pool, 2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.free([first])
    pool.free([second])
    pool.share(b"first")
    pool.free([first])
    assert pool.allocate() == second
    assert pool.find(b"first") == first


def test_equal_content_is_published_once():
    pool = BlockPool(3, 2)
    first, second = taken(pool, 2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    pool.free([second])
    assert (pool.find(b"key"), pool.cached_blocks) == (first, 0)


def test_a_block_is_not_freed_twice():
    pool = BlockPool(3, 2)
    block = pool.allocate()
    pool.free([block])
    with pytest.raises(AssertionError, match="freed once"):
        pool.free([block])


@examples(50, 200)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 5)), max_size=60))
def test_a_pool_agrees_with_a_simple_model(operations):
    """The model: reference counts, keys, and unused blocks in order of last use."""
    pool = BlockPool(5, 2)
    holders, keys, held, unused = dict.fromkeys(range(1, 5), 0), {}, [], []
    for name, number in operations:
        key = bytes([number])
        if name == "take" and pool.available_blocks:
            plain = [b for b in holders if not holders[b] and b not in keys]
            block = pool.allocate()
            assert block in plain if plain else block == unused[0]
            keys.pop(block, None)
            unused = [b for b in unused if b != block]
            holders[block] += 1
            held.append(block)
        elif name == "share" and key in keys.values():
            block = pool.share(key)
            assert keys[block] == key
            unused = [b for b in unused if b != block]
            holders[block] += 1
            held.append(block)
        elif name == "free" and held:
            block = held.pop(number % len(held))
            pool.free([block])
            holders[block] -= 1
            if block in keys and not holders[block]:
                unused.append(block)
        elif name == "publish" and held:
            block = held[number % len(held)]
            pool.publish(block, key)
            if block not in keys and key not in keys.values():
                keys[block] = key
        assert pool.used_blocks == sum(map(bool, holders.values()))
        assert pool.cached_blocks == len(unused)
        for block, count in holders.items():
            assert pool.ref_count(block) == count
        for number in range(6):
            owner = [b for b in keys if keys[b] == bytes([number])]
            assert pool.find(bytes([number])) == (owner[0] if owner else None)
