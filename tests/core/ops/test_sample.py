"""Sampled tokens against searches in the cumulative distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inl.ops import catalog
from inl.ops.step import empty_tables, make_step
from inl.spec.message import Row, step_frame
from inl.spec.step import Bucket

CHOOSE, MASK = catalog()["sample"].body, catalog()["mask_logits"].body


def chosen(logits, uniforms, heats, sampler="sample", width=1):
    """Tokens and tables of rows in slots 1, 2, ... with these temperatures."""
    rows = len(heats)
    tables = empty_tables(groups=1, slots=rows + 2, max_blocks_per_seq=2)
    tables.blocks[0, 1:] = np.arange(2 * rows + 2).reshape(-1, 2)
    tables.params[1 : rows + 1, 0] = heats
    bucket = Bucket(rows * width, rows, width, sampler)
    cut = np.asarray(uniforms, np.float32).reshape(rows, width)
    message = step_frame(
        bucket,
        [Row(1 + row, [5] * width, by_position(cut[row])) for row in range(rows)],
        step=0, groups=1, block_size=4, decode_rows=rows,
    )  # fmt: skip
    step, tables = make_step.body(message, tables, bucket=bucket, block_size=4)
    return CHOOSE(logits, step, tables, sampler=sampler)


def by_position(uniforms):
    """The uniform numbers of positions 1, 2, ... where a frame holds them."""
    width = len(uniforms)
    found = [0.0] * (2 * width - 1)
    for position, number in enumerate(uniforms, start=1):
        found[position % len(found)] = number
    return found


def searched(logits, uniform, heat):
    """First id whose cumulative probability exceeds the uniform number."""
    odds = np.exp((logits - logits.max()) / heat)
    cdf = np.cumsum(odds / odds.sum())
    return min(int(np.searchsorted(cdf, uniform, side="right")), len(cdf) - 1)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 50),
    heat=st.floats(0.1, 4),
    width=st.integers(1, 3),
)
def test_sample_searches_the_cumulative_distribution(seed, vocab, heat, width):
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal((2 * width, vocab))
    uniforms = rng.random(2 * width).astype(np.float32)
    tokens, tables = chosen(logits, uniforms, [heat, 0.0], width=width)
    heat = float(np.float32(heat))
    for place in range(width):
        assert tokens[place] == searched(logits[place], uniforms[place], heat)
        assert tokens[width + place] == logits[width + place].argmax()
    assert tables.last.tolist() == [0, tokens[width - 1], tokens[-1], 0]
    assert tokens.dtype == np.int32


def test_sampled_tokens_follow_the_distribution():
    logits = np.log(np.array([0.5, 0.0625, 0.25, 0.1875]))
    count = 4096
    uniforms = (np.arange(count) + 0.5) / count
    tokens, _ = chosen(np.tile(logits, (count, 1)), uniforms, [1.0] * count)
    shares = np.bincount(tokens, minlength=4) / count
    assert np.abs(shares - [0.5, 0.0625, 0.25, 0.1875]).max() <= 1 / count


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.49, 0), (0.5, 1), (0.999999, 1)]
)
def test_uniform_numbers_at_the_edges_of_two_equal_tokens(uniform, token):
    tokens, _ = chosen(np.zeros((1, 2)), [uniform], [1.0])
    assert tokens.tolist() == [token]


def test_ties_go_to_the_lowest_id():
    logits = np.array([[1.0, 2.0, 2.0], [2.0, 2.0, 2.0]])
    for sampler in ("greedy", "sample"):
        tokens, _ = chosen(logits, [0.9, 0.9], [0.0, 0.0], sampler)
        assert tokens.tolist() == [1, 0]


def test_greedy_programs_ignore_the_temperature():
    logits = np.array([[0.0, 1.0]])
    assert chosen(logits, [0.0], [5.0], "greedy")[0].tolist() == [1]
    assert chosen(logits, [0.0], [5.0], "sample")[0].tolist() == [0]


@given(
    vocab=st.integers(1, 80),
    seed=st.integers(0, 2**32 - 1),
)
def test_masks_keep_the_allowed_bits(vocab, seed):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((2, vocab))
    words = -(-vocab // 32)
    bits = rng.integers(0, 2, (2, words * 32))
    masks = [
        sum(int(bits[row, 32 * word + bit]) << bit for bit in range(32))
        for row in range(2)
        for word in range(words)
    ]
    packed = np.array(masks, np.uint32).view(np.int32).reshape(2, words)
    found = MASK(logits, packed)
    for row in range(2):
        for token in range(vocab):
            kept = logits[row, token] if bits[row, token] else np.float32(-1e30)
            assert found[row, token] == kept
