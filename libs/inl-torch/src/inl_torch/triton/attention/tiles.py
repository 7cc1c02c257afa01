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
        score = tl.where(visible, score, -1e30)
    m_new = tl.maximum(m_i, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - m_new[:, None])
    if WINDOWED:
        # Where all keys of a tile are masked, the maximum is no score.
        p = tl.where(visible, p, 0.0)
    rescale = tl.exp2(m_i - m_new)
    l_i = l_i * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(p.to(value.dtype), value, acc=acc, input_precision="ieee")
    return m_new, l_i, acc


@triton.jit
def attend_tiles(
    q: tensor, k: tensor, v: tensor, table: tensor, positions: tensor, work: tensor,
    out: tensor, q_stride: tensor, width: tensor, scale: tensor, window: tensor,
    cap: tensor, scales: tensor, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr,
    KEYS: tl.constexpr, M: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of one tile of the list ``work`` over all visible keys.

    Row m of the tile is head ``m % LANES`` of its query ``m // LANES``. Tiles of row -1
    are padding, whose output is 0.
    """
    CHUNKS: tl.constexpr = (GROUP + LANES - 1) // LANES
    kv_head = tl.program_id(0) // CHUNKS
    tile = tl.program_id(1)
    row = tl.load(work + tile * 3).to(tl.int64)
    first = tl.load(work + tile * 3 + 1).to(tl.int64)
    count = tl.load(work + tile * 3 + 2)
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
    if WINDOWED:
        first_masked = tl.maximum(begin - window + 1, 0) // KEYS * KEYS
    else:
        # Keys before this one are visible to every query of the tile.
        first_masked = tl.maximum(begin + 1, 0) // KEYS * KEYS
        for start in range(0, first_masked, KEYS):
            m_i, l_i, acc = accumulate_tile(
                x, k, v, row_table, start + key_range, position, last, kv_head, scale,
                window, cap, m_i, l_i, acc, SIZE, KV_HEADS, DIM, DIM_P, False, False,
                CAPPED,
            )  # fmt: skip
    for start in range(first_masked, last, KEYS):
        m_i, l_i, acc = accumulate_tile(
            x, k, v, row_table, start + key_range, position, last, kv_head, scale,
            window, cap, m_i, l_i, acc, SIZE, KV_HEADS, DIM, DIM_P, True, WINDOWED,
            CAPPED,
        )  # fmt: skip
    acc = times(acc / tl.where(l_i > 0, l_i, 1)[:, None], scales, 1)
    slot = token * (KV_HEADS * GROUP) + head
    tl.store(out + slot[:, None] * DIM + d[None, :], acc, mask=is_inside)
