"""Paged attention against a loop over contiguous keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from inl.checkpoints.blocks.decode_32 import E4M3
from inl.ops import catalog
from inl.ops.attention import random_step
from inl.ops.step import empty_tables, make_step
from inl.spec.cache import Cache
from inl.spec.message import step_frame
from inl.spec.step import Bucket
from inl.spec.tolerance import BodyOps

BLOCK = 4


def one_query(q, keys, values, scale, cap):
    """Softmax attention of one head's query over lists of keys and values."""
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    if cap is not None:
        scores = [cap * math.tanh(score / cap) for score in scores]
    top = max(scores)
    shares = [math.exp(score - top) for score in scores]
    total = math.fsum(shares)
    return [
        math.fsum(share * value[i] for share, value in zip(shares, values, strict=True))
        / total
        for i in range(len(q))
    ]


def plainly(q, texts, cached, counts, shared, scale, window, cap):
    """texts: for each row, its keys and values [length, kv_heads, d]."""
    out, at = np.zeros_like(q), 0
    for (keys, values), old, new in zip(texts, cached, counts, strict=True):
        for position in range(old, old + new):
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            for head in range(q.shape[1]):
                kv = head // shared
                out[at, head] = one_query(
                    q[at, head], keys[seen, kv], values[seen, kv], scale, cap
                )
            at += 1
    return out


@examples(12, 40)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4
    ),
    kv_heads=st.sampled_from([1, 2, 3]),
    shared=st.sampled_from([1, 2, 3]),
    window=st.sampled_from([None, 1, 3, 8]),
    cap=st.sampled_from([None, 1.5]),
    pads=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention(rows, kv_heads, shared, window, cap, pads, seed):
    rng = np.random.default_rng(seed)
    cached, counts = [old for old, _ in rows], [new for _, new in rows]
    step, blocks = random_step(
        rng, cached, counts, block_size=BLOCK, pad_rows=pads[0], pad_tokens=pads[1]
    )
    dim = 4
    cache = Cache(*rng.standard_normal((2, blocks, BLOCK, kv_heads, dim)))
    texts = []
    for row, (old, new) in enumerate(rows):
        keys, values = rng.standard_normal((2, old + new, kv_heads, dim))
        for position in range(old + new):
            block = step.blocks[0, row, position // BLOCK]
            cache.k[block, position % BLOCK] = keys[position]
            cache.v[block, position % BLOCK] = values[position]
        texts.append((keys, values))
    q = rng.standard_normal((sum(counts) + pads[1], kv_heads * shared, dim))
    found = catalog()["attention"].body(
        q, cache, step, scale=0.7, window=window, cap=cap, group=0
    )
    expected = plainly(q, texts, cached, counts, shared, 0.7, window, cap)
    assert np.allclose(found, expected, rtol=0, atol=1e-13)
    assert not found[sum(counts) :].any()


def test_attend_includes_the_token_that_it_caches():
    rng = np.random.default_rng(3)
    step, blocks = random_step(rng, [5, 0], [1, 3], block_size=BLOCK)
    cache = Cache(*rng.standard_normal((2, blocks, BLOCK, 2, 4)))
    q, (k, v) = rng.standard_normal((4, 2, 4)), rng.standard_normal((2, 4, 2, 4))
    body = BodyOps(lambda _spec, result: result)
    found, after = body.attend(q, k, v, cache, step, scale=1.0)
    for row, (old, new) in enumerate(((5, 1), (0, 3))):
        for offset in range(new):
            position = old + offset
            block = step.blocks[0, row, position // BLOCK]
            at = step.starts[row] + offset
            assert np.array_equal(after.k[block, position % BLOCK], k[at])
            assert np.array_equal(after.v[block, position % BLOCK], v[at])
    # The first token of a sequence attends only to itself.
    assert np.allclose(found[1], v[1])
    attrs = {"scale": 1.0, "window": None, "cap": None, "group": 0}
    assert np.array_equal(found, catalog()["attention"].body(q, after, step, **attrs))


def test_a_cache_in_float8_is_one_of_its_rounded_keys():
    """Writes round what they divide; attention is that over the products."""
    rng = np.random.default_rng(2)
    step, blocks = random_step(rng, [3, 0], [2, 5], block_size=BLOCK)
    q, k, v = rng.standard_normal((3, 7, 2, 4))
    zeros = np.zeros((blocks, BLOCK, 2, 4))
    cache = Cache(zeros, zeros, np.array([0.37, 0.01], np.float32))
    after = catalog()["write_kv"].body(k, 9 * v, cache, step.writes[0])
    factors = after.scales.astype(np.float64)
    cells = step.writes[0] // BLOCK, step.writes[0] % BLOCK
    assert np.abs(after.k[cells] * factors[0] / k - 1).max() < 2**-4 + 1e-9
    assert (np.abs(after.v[cells]) == 448).any()  # 4.48 is the largest value
    assert set(np.abs(after.k).ravel()) <= set(E4M3[:127].astype(float))
    attrs = {"scale": 1.0, "window": None, "cap": None, "group": 0}
    plain = Cache(after.k * factors[0], after.v * factors[1])
    body = catalog()["attention"].body
    found = body(q, after, step, **attrs)
    assert np.allclose(found, body(q, plain, step, **attrs), rtol=1e-12)
    assert not np.allclose(found, body(q, after._replace(scales=None), step, **attrs))


def test_a_padding_only_step_gives_zeros():
    rng = np.random.default_rng(0)
    tables = empty_tables(groups=1, slots=2, max_blocks_per_seq=3)
    bucket = Bucket(5, 2)
    message = step_frame(bucket, (), step=0, groups=1, block_size=BLOCK, decode_rows=0)
    step, _ = make_step.body(message, tables, bucket=bucket, block_size=BLOCK)
    cache = Cache(*rng.standard_normal((2, 4, BLOCK, 2, 4)))
    q = rng.standard_normal((5, 2, 4))
    attrs = {"scale": 1.0, "window": None, "cap": None, "group": 0}
    found = catalog()["attention"].body(q, cache, step, **attrs)
    assert found.shape == q.shape
    assert not found.any()


@pytest.mark.parametrize("size", [1e4, 1e6])
def test_large_scores_do_not_overflow(size):
    rng = np.random.default_rng(0)
    step, blocks = random_step(rng, [6], [2], block_size=BLOCK)
    cache = Cache(*rng.standard_normal((2, blocks, BLOCK, 1, 4)))
    q = size * rng.standard_normal((2, 1, 4))
    attrs = {"scale": 1.0, "window": None, "cap": None, "group": 0}
    assert np.isfinite(catalog()["attention"].body(q, cache, step, **attrs)).all()
