"""The most likely tokens of a row: the segments of its logits that hold them.

A row's k-th highest logit is at least the k-th highest of the maxima of its segments,
so that k segments hold its k most likely tokens, and one program reads them all.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

SEGMENT = tl.constexpr(64)
"""Logits of a segment: a cache line in 16 bits."""

MOST = tl.constexpr(128)
"""Most segments of a row that one program reads."""

PADDING = tl.constexpr(-(1 << 31))
"""Key of no logit, below that of -inf."""


@triton.jit
def ordered(x: tensor) -> tensor:
    """Return integers in the order of ``x``, float32 without NaN; 0.0 equals -0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def kth_highest(keys: tensor, k: tensor) -> tensor:
    """Return the largest integer that ``k`` of ``keys`` reach, or the smallest key."""
    low = tl.min(keys, 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def store_segments(
    tops: tensor, listed: tensor, sample: tensor, k: tensor, COUNT: tl.constexpr,
    COUNT_P: tl.constexpr,
) -> tensor:  # fmt: skip
    """Store the segments with the ``k`` highest maxima; return the key of the k-th, or
    ``PADDING`` if there are fewer.

    tops: [S, COUNT]. listed: [S, MOST], in ascending order, then ``COUNT``. Of equal
    maxima the first are stored, which hold the lowest ids of that logit.
    """
    at = tl.arange(0, COUNT_P)
    inside = at < COUNT
    top = tl.load(tops + sample * COUNT + at, mask=inside, other=0)
    keys = tl.where(inside, ordered(top), PADDING)
    kth = tl.where(k > COUNT, PADDING, kth_highest(keys, k))
    above, equal = keys > kth, (keys == kth) & inside
    spare = k - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= spare))
    rank = tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(listed + sample * MOST + rank, at, mask=taken)
    each = tl.arange(0, MOST)
    found = tl.sum(taken.to(tl.int32), 0)
    empty = tl.full((MOST,), COUNT, tl.int32)
    tl.store(listed + sample * MOST + each, empty, mask=each >= found)
    return kth
