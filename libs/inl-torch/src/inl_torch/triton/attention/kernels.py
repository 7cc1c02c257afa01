"""Triton kernels of :mod:`inl_torch.triton.attention.attention`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.attention.float8 import from_cache, times


@triton.jit
def attend(
    q: tensor, k: tensor, v: tensor, table: tensor, token_rows: tensor,
    positions: tensor, used: tensor, items: tensor, out: tensor, split_acc: tensor,
    split_stats: tensor, q_stride: tensor, width: tensor, scale: tensor, window: tensor,
    cap: tensor, scales: tensor, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr,
    KEYS: tl.constexpr, M: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of one token over one split of its keys, see
    :mod:`inl_torch.triton.attention.row_splits`. Tokens from ``used`` on become 0.
    """
    CHUNKS: tl.constexpr = (GROUP + LANES - 1) // LANES
    # Heads of a token are adjacent programs, since their keys are adjacent.
    kv_head = tl.program_id(0) // CHUNKS
    item = tl.program_id(1)
    token = tl.load(items + item * 4).to(tl.int64)
    split = tl.load(items + item * 4 + 1)
    splits = tl.load(items + item * 4 + 2)
    if split >= splits:
        return
    is_token = token < tl.load(used)
    row = tl.load(token_rows + token).to(tl.int64)
    m = tl.arange(0, M)
    group_head = (tl.program_id(0) % CHUNKS) * LANES + m
    is_head = (m < LANES) & (group_head < GROUP)
    position = tl.where(is_token, tl.load(positions + token).to(tl.int32), -1)
    head = kv_head * GROUP + group_head
    d = tl.arange(0, DIM_P)
    cells = token * q_stride + head[:, None] * DIM + d[None, :]
    x = tl.load(q + cells, mask=is_head[:, None] & (d < DIM)[None, :], other=0)

    last = position + 1
    first_key = 0
    if WINDOWED:
        first_key = tl.maximum(last - window, 0)
    split_keys = ((last - first_key + KEYS - 1) // KEYS + splits - 1) // splits * KEYS
    begin = first_key + split * split_keys
    end = tl.minimum(begin + split_keys, last)

    scale = times(scale, scales, 0)
    m_i = tl.full((M,), -1e30, tl.float32)
    l_i = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DIM_P), tl.float32)
    for start in range(begin, end, KEYS):
        key_index = start + tl.arange(0, KEYS)
        valid = key_index < end
        block = tl.load(table + row * width + key_index // SIZE, mask=valid, other=0)
        slot = block.to(tl.int64) * SIZE + key_index % SIZE
        inner = (slot * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
        both = valid[:, None] & (d < DIM)[None, :]
        key = from_cache(tl.load(k + inner, mask=both, other=0), x.dtype)
        value = from_cache(tl.load(v + inner, mask=both, other=0), x.dtype)
        score = tl.dot(x, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            score = cap * (1 - 2 / (tl.exp(2 * score / cap) + 1))
        score = tl.where(valid[None, :], score, -1e30)
        m_new = tl.maximum(m_i, tl.max(score, 1))
        p = tl.where(valid[None, :], tl.exp(score - m_new[:, None]), 0.0)
        rescale = tl.exp(m_i - m_new)
        l_i = l_i * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        acc += tl.dot(p.to(value.dtype), value, input_precision="ieee")
        m_i = m_new

    acc = times(acc, scales, 1)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    both = is_head[:, None] & (d < DIM)[None, :]
    if splits == 1:
        acc = acc / tl.where(l_i > 0, l_i, 1)[:, None]
        slot = token * HEADS + head
        tl.store(out + slot[:, None] * DIM + d[None, :], acc, mask=both)
    else:
        slot = item.to(tl.int64) * HEADS + head
        tl.store(split_acc + slot[:, None] * DIM + d[None, :], acc, mask=both)
        tl.store(split_stats + slot * 2, m_i, mask=is_head)
        tl.store(split_stats + slot * 2 + 1, l_i, mask=is_head)


@triton.jit
def combine(
    split_acc: tensor, split_stats: tensor, tokens: tensor, out: tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the splits of one head of one token, weighted by their softmax sums.

    ``SPLITS`` are merged at a time. tokens: as in ``Items``; a token of one split, or
    of none, is left as it is.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.load(tokens + token * 2)
    if splits <= 1:
        return
    first = tl.load(tokens + token * 2 + 1).to(tl.int64)
    d = tl.arange(0, DIM_P)
    m_max = -1e30
    denominator = 0.0
    acc = tl.zeros((DIM_P,), tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        inside = split < splits
        slot = (first + split) * HEADS + head
        m_i = tl.load(split_stats + slot * 2, mask=inside, other=-1e30)
        l_i = tl.load(split_stats + slot * 2 + 1, mask=inside, other=0)
        both = inside[:, None] & (d < DIM)[None, :]
        key_index = slot[:, None] * DIM + d[None, :]
        values = tl.load(split_acc + key_index, mask=both, other=0)
        m_new = tl.maximum(m_max, tl.max(m_i, 0))
        weight = tl.exp(m_i - m_new)
        rescale = tl.exp(m_max - m_new)
        denominator = denominator * rescale + tl.sum(l_i * weight, 0)
        acc = acc * rescale + tl.sum(values * weight[:, None], 0)
        m_max = m_new
    acc = acc / tl.where(denominator > 0, denominator, 1)
    tl.store(out + (token * HEADS + head) * DIM + d, acc, mask=d < DIM)
