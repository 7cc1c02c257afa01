"""Triton kernel of prefill attention: a tile of queries times all heads of a group.

The queries of one row times the heads that share its keys are the rows of one matrix,
so that a tile is full for any group size. Exponentials have base 2, with log2(e) as a
part of the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.attention.float8 import from_cache, times
from inl_torch.triton.attention.tile_splits import COLUMNS

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def accumulate_tile(
    x: tensor, k: tensor, v: tensor, row_table: tensor, key_index: tensor,
    position: tensor, last: tensor, kv_head: tensor, scale: tensor, window: tensor,
    cap: tensor, m_i: tensor, l_i: tensor, acc: tensor, SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Accumulate attention of the queries at ``position`` to the keys ``key_index``.

    Returns the new running maximum ``m_i``, sum ``l_i`` and accumulator.
    """
    d = tl.arange(0, DIM_P)
    if MASKED:
        valid = key_index < last
        block = tl.load(row_table + key_index // SIZE, mask=valid, other=0).to(tl.int64)
    else:
        block = tl.load(row_table + key_index // SIZE).to(tl.int64)
    slot = (block * SIZE + key_index % SIZE) * KV_HEADS + kv_head
    inner = slot[:, None] * DIM + d[None, :]
    if MASKED:
        is_inside = valid[:, None] & (d < DIM)[None, :]
        key = tl.load(k + inner, mask=is_inside, other=0)
        value = tl.load(v + inner, mask=is_inside, other=0)
    elif DIM < DIM_P:
        is_inside = (d < DIM)[None, :]
        key = tl.load(k + inner, mask=is_inside, other=0)
        value = tl.load(v + inner, mask=is_inside, other=0)
    else:
        key = tl.load(k + inner)
        value = tl.load(v + inner)
    key, value = from_cache(key, x.dtype), from_cache(value, x.dtype)
    score = tl.dot(x, tl.trans(key), input_precision="ieee")
    if CAPPED:
        # tanh by its exponential; the scale has base e here, and is 1 afterwards.
        score = cap * LOG2E * (1 - 2 / (tl.exp2(score * (scale * 2 * LOG2E / cap)) + 1))
        scale = 1.0
    if MASKED:
        visible = (key_index[None, :] <= position[:, None]) & valid[None, :]
        if WINDOWED:
            visible = visible & (position[:, None] - key_index[None, :] < window)
        # The maximum of a tile whose keys are all masked stays finite.
        score = tl.where(visible, score, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - m_new[:, None])
    rescale = tl.exp2(m_i - m_new)
    l_i = l_i * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc=acc, input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def attend_tiles(
    q: tensor, k: tensor, v: tensor, table: tensor, positions: tensor, work: tensor,
    out: tensor, q_stride: tensor, width: tensor, scale: tensor, window: tensor,
    cap: tensor, scales: tensor, split_acc: tensor, split_stats: tensor,
    SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, KEYS: tl.constexpr,
    M: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of one tile over all visible keys, or over one split of them.

    work: tiles of :meth:`~inl_torch.triton.attention.plan.Work.tiles`, or with
    ``SPLIT`` entries of :class:`~inl_torch.triton.attention.tile_splits.TileItems`.
    Row m of the tile is head ``m % LANES`` of its query ``m // LANES``. Tiles of row -1
    are padding, whose output is 0.
    """
    CHUNKS: tl.constexpr = (GROUP + LANES - 1) // LANES
    kv_head = tl.program_id(0) // CHUNKS
    entry = work + tl.program_id(1) * (COLUMNS if SPLIT else 3)
    row = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1).to(tl.int64)
    count = tl.load(entry + 2)
    if count == 0:
        return
    m = tl.arange(0, M)
    group_head = (tl.program_id(0) % CHUNKS) * LANES + m % LANES
    query = m // LANES
    is_head = (query < count) & (group_head < GROUP)
    head = kv_head * GROUP + group_head
    token = first + query
    d = tl.arange(0, DIM_P)
    is_inside = is_head[:, None] & (d < DIM)[None, :]
    offsets = token[:, None] * q_stride + head[:, None] * DIM + d[None, :]
    x = tl.load(q + offsets, mask=is_inside, other=0)
    # Padding is positioned before the first key.
    begin = tl.where(row < 0, -count, tl.load(positions + first).to(tl.int32))
    last = begin + count
    position = begin + query
    row_table = table + row * width
    key_range = tl.arange(0, KEYS)
    scale = times(scale, scales, 0)
    m_i = tl.full((M,), -1e30, tl.float32)
    l_i = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DIM_P), tl.float32)
    first_key, end = 0, last
    if WINDOWED:
        first_key = tl.maximum(begin - window + 1, 0) // KEYS * KEYS
    if SPLIT:
        split, splits = tl.load(entry + 3), tl.load(entry + 4)
        key_tiles = (last - first_key + KEYS - 1) // KEYS
        split_keys = (key_tiles + splits - 1) // splits * KEYS
        first_key += split * split_keys
        end = tl.minimum(first_key + split_keys, last)
    if not WINDOWED:
        # Keys before this one are visible to every query of the tile.
        first_masked = tl.maximum(begin + 1, 0) // KEYS * KEYS
        if SPLIT:
            first_masked = tl.minimum(first_masked, end)
        for start in range(first_key, first_masked, KEYS):
            m_i, l_i, acc = accumulate_tile(
                x, k, v, row_table, start + key_range, position, end, kv_head, scale,
                window, cap, m_i, l_i, acc, SIZE, KV_HEADS, DIM, DIM_P, False, False,
                CAPPED,
            )  # fmt: skip
        first_key = tl.maximum(first_key, first_masked) if SPLIT else first_masked
    for start in range(first_key, end, KEYS):
        m_i, l_i, acc = accumulate_tile(
            x, k, v, row_table, start + key_range, position, end, kv_head, scale,
            window, cap, m_i, l_i, acc, SIZE, KV_HEADS, DIM, DIM_P, True, WINDOWED,
            CAPPED,
        )  # fmt: skip
    slot = token * (KV_HEADS * GROUP) + head
    cells = out + slot[:, None] * DIM + d[None, :]
    if SPLIT:
        acc = times(acc, scales, 1)
        # Loaded again: in the loop they would take registers.
        split = tl.load(entry + 3, volatile=True)
        if tl.load(entry + 4, volatile=True) == 1:
            acc = acc / tl.where(l_i > 0, l_i, 1)[:, None]
            tl.store(cells, acc, mask=is_inside)
        else:
            part = (tl.load(entry + 5) + split).to(tl.int64)
            cell = (part * tl.num_programs(0) + tl.program_id(0)) * M + m
            parts = split_acc + cell[:, None] * DIM_P + d[None, :]
            tl.store(parts, acc, mask=is_head[:, None])
            # A query that sees no key of the split has a maximum that outweighs none.
            tl.store(split_stats + cell * 2, m_i, mask=is_head)
            tl.store(split_stats + cell * 2 + 1, l_i, mask=is_head)
    else:
        acc = times(acc / tl.where(l_i > 0, l_i, 1)[:, None], scales, 1)
        tl.store(cells, acc, mask=is_inside)
