"""Attention in chunks: each token sees the tokens of its chunk and no others."""

from __future__ import annotations

import numpy as np
import pytest

from inl.errors import RequestError
from inl.ops.attention import SHAPES, attention, random_step
from inl.ops.chunks import chunk_rows, temper_queries
from inl.spec.cache import Cache

RNG = np.random.default_rng(2)
BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
SCALE = DIM**-0.5


def of_one_token(q, cache, step, row, position, first):
    """Softmax over the keys from ``first`` to ``position``, key by key."""
    cells = [
        (step.blocks[0, row, at // BLOCK], at % BLOCK)
        for at in range(first, position + 1)
    ]
    keys = np.array([cache.k[cell] for cell in cells]).repeat(HEADS // KV_HEADS, 1)
    values = np.array([cache.v[cell] for cell in cells]).repeat(HEADS // KV_HEADS, 1)
    weights = np.exp(np.einsum("hd,khd->hk", q, keys) * SCALE)
    return np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), values)


@pytest.mark.parametrize("chunk", [4, 8, 12, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=[shape[0] for shape in SHAPES])
def test_tokens_see_their_chunk(shape, chunk):
    _, cached, counts, pads = shape
    step, blocks = random_step(RNG, cached, counts, **pads)
    cache = Cache(*RNG.standard_normal((2, blocks, BLOCK, KV_HEADS, DIM)))
    q = RNG.standard_normal((step.tokens.shape[0], HEADS, DIM))
    rows = chunk_rows.body(step, chunk=chunk, block_size=BLOCK)
    found = attention.body(q, cache, rows, scale=SCALE, window=None, cap=None, group=0)
    used = int(step.used_counts[2])
    for token in range(used):
        row, position = int(step.rows[token]), int(step.positions[token])
        first = position // chunk * chunk
        expected = of_one_token(q[token], cache, step, row, position, first)
        assert np.allclose(found[token], expected)
    assert not found[used:].any()


def test_a_chunk_is_a_whole_number_of_blocks():
    step, _ = random_step(RNG, [3], [2])
    with pytest.raises(RequestError, match="chunk: found 10 tokens, accepted: a multi"):
        chunk_rows.body(step, chunk=10, block_size=BLOCK)


def test_queries_grow_at_multiples_of_the_floor():
    q, positions = np.ones((4, 1, 2)), np.array([0, 6, 7, 23], np.int32)
    found = temper_queries.body(q, positions, floor=8, gain=0.5)[:, 0, 0]
    assert np.allclose(found, 1 + 0.5 * np.log([1, 1, 2, 4]))
