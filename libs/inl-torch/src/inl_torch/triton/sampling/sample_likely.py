"""Triton kernels that sample rows whose filters keep few tokens, without a search.

Such a row has a small top-k, or a top-p or min-p that the tokens of its highest
segments fill. One program holds them in registers. Other rows are left to the search of
:mod:`inl_torch.triton.sampling.sample_filtered_search`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.sampling.reductions import global_top
from inl_torch.triton.sampling.sample_filtered_kernels import MIN_P
from inl_torch.triton.sampling.sample_filtered_search import TOP_K, TOP_P
from inl_torch.triton.sampling.segments import (
    MOST,
    PADDING,
    SEGMENT,
    kth_highest,
    ordered,
    store_segments,
)


@triton.jit
def list_segments(
    tops: tensor, param_table: tensor, slots: tensor, listed: tensor, limits: tensor,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr, COUNT_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """List the segments of a row that may be sampled from its most likely tokens.

    limits: [S], the key of the lowest of their maxima.
    """
    pdl_sync(PDL)
    sample = tl.program_id(0).to(tl.int64)
    row_params = param_table + tl.load(slots + sample).to(tl.int64) * COLUMNS
    top_k = tl.load(row_params + TOP_K)
    filters = (top_k >= 1) | (tl.load(row_params + TOP_P) < 1)
    filters = filters | (tl.load(row_params + MIN_P) > 0)
    if (tl.load(row_params) <= 0) | (top_k > MOST) | (filters == 0):
        return
    count = tl.where(top_k >= 1, top_k, MOST).to(tl.int32)
    limit = store_segments(tops, listed, sample, count, COUNT, COUNT_P)
    tl.store(limits + sample, limit)


@triton.jit
def sample_likely(
    logits: tensor, penalized: tensor, changed: tensor, top_logits: tensor,
    top_ids: tensor, param_table: tensor, slots: tensor, is_sampled: tensor,
    listed: tensor, limits: tensor, masses: tensor, uniforms: tensor, tokens: tensor,
    last: tensor, stride: tensor, V: tensor, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Sample a row from the tokens of its listed segments, if its filters keep no
    others, or without randomness; ``is_sampled`` [S] tells.

    masses: [S, CHUNKS] of rows without top-k, each relative to the chunk's top logit.
    """
    pdl_sync(PDL)
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    row_params = param_table + slot * COLUMNS
    temperature, top_k = tl.load(row_params), tl.load(row_params + TOP_K)
    top_p, min_p = tl.load(row_params + TOP_P), tl.load(row_params + MIN_P)
    top_logit, top_id = global_top(top_logits, top_ids, sample, CHUNKS, CHUNKS_P)
    is_greedy = (temperature <= 0) | (top_id < 0)
    tl.store(is_sampled + sample, is_greedy.to(tl.int32))
    if is_greedy:
        tl.store(tokens + sample, top_id)
        tl.store(last + slot, tl.maximum(top_id, 0))
        return
    has_filter = (top_k >= 1) | (top_p < 1) | (min_p > 0)
    if (top_k > MOST) | (has_filter == 0):
        return
    each = tl.arange(0, MOST * SEGMENT)
    segment = tl.load(listed + sample * MOST + each // SEGMENT)
    at = segment * SEGMENT + each % SEGMENT
    chunk = at // CHUNK
    inside = (chunk < CHUNKS) & (at < V)
    is_changed = tl.load(changed + sample * CHUNKS + chunk, mask=inside, other=0) > 0
    is_plain = inside & (is_changed == 0)
    x = tl.load(logits + sample * stride + at, mask=is_plain, other=0).to(tl.float32)
    other = tl.load(penalized + sample * V + at, mask=inside & is_changed, other=0)
    x = tl.where(is_plain, x, other)
    mass = tl.exp((x - top_logit) / temperature)
    limit = tl.load(limits + sample)
    # Without top-k, segments that are not listed may have logits that equal the limit.
    keys = ordered(x)
    kept = inside & (keys >= tl.where(top_k >= 1, limit, limit + 1))
    keys = tl.where(kept, keys, PADDING)
    threshold, quota, total = limit, 0.0 * top_k, 0.0 * top_k
    is_enough = top_k >= 1
    if is_enough:
        threshold = kth_highest(keys, top_k.to(tl.int32))
        quota = top_k - tl.sum((keys > threshold).to(tl.int32), 0).to(tl.float32)
        # With fewer than k tokens, no token is at the threshold.
        tie_mass = tl.max(tl.where(kept & (keys == threshold), mass, 0.0), 0)
        total = tl.sum(tl.where(keys > threshold, mass, 0.0), 0) + quota * tie_mass
    else:
        chunks = tl.arange(0, CHUNKS_P)
        cells, valid = sample * CHUNKS + chunks, chunks < CHUNKS
        highest = tl.load(top_logits + cells, mask=valid, other=float("-inf"))
        share = tl.exp((highest - top_logit) / temperature)
        part = tl.load(masses + cells, mask=valid, other=0)
        total = tl.sum(tl.where(share > 0, part * share, 0.0), 0)
        found = tl.sum(tl.where(kept, mass, 0.0), 0)
        rest = tl.max(tl.where(inside & (kept == 0), mass, 0.0), 0)
        is_enough = ((top_p < 1) & (found >= top_p * total)) | (rest < min_p)
    if is_enough == 0:
        return
    if top_p < 1:
        # The lowest threshold whose tokens and those above it reach the target.
        target = top_p * total
        low, high = threshold.to(tl.int64), tl.max(keys, 0).to(tl.int64)
        while low < high:
            middle = low + (high - low + 1) // 2
            reached = tl.where(keys >= middle.to(tl.int32), mass, 0.0)
            enough = tl.sum(reached, 0) >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        lowest = low.to(tl.int32)
        tie_mass = tl.max(tl.where(kept & (keys == lowest), mass, 0.0), 0)
        above = tl.sum(tl.where(keys > lowest, mass, 0.0), 0)
        needed = tl.maximum(tl.ceil((target - above) / tie_mass), 1.0)
        quota = tl.where(lowest > threshold, needed, tl.minimum(quota, needed))
        threshold = lowest
    kept = kept & (mass >= min_p)
    is_tie = (kept & (keys == threshold)).to(tl.int32)
    rank = tl.cumsum(is_tie, 0).to(tl.float32)
    kept = kept & ((keys > threshold) | ((is_tie > 0) & (rank <= quota)))
    mass = tl.where(kept, mass, 0.0)
    cumulative = tl.cumsum(mass, 0)
    target = tl.load(uniforms + sample).to(tl.float32, bitcast=True)
    target *= tl.max(cumulative, 0)
    final = tl.max(tl.where(mass > 0, at, 0), 0)
    token = tl.min(tl.where((mass > 0) & (cumulative > target), at, final), 0)
    tl.store(tokens + sample, token)
    tl.store(last + slot, token)
    tl.store(is_sampled + sample, 1)
