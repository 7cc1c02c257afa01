"""Triton kernels of :mod:`inl_torch.triton.attention.rope_attend`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.attention.float8 import (
    from_cache,
    times,
    to_cache,
)
from inl_torch.triton.attention.tiles import LOG2E
from inl_torch.triton.barrier import finish_stores
from inl_torch.triton.pdl import pdl_sync

CACHE_GLOBAL = tl.constexpr(".cg")
"""Cache modifier of loads before ``pdl_sync``: bypasses the L1 cache, which may hold
data of the previous step."""


@triton.jit
def load_rotated(
    pointers: tensor, cos: tensor, sin: tensor, mask: tensor, HALF: tl.constexpr,
    DIM_P: tl.constexpr,
) -> tensor:  # fmt: skip
    """Load heads at ``pointers`` [n, 1] and rotate them in float32: [n, DIM_P]."""
    d = tl.arange(0, DIM_P)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    x = tl.load(pointers + d[None, :], mask=mask, other=0).to(tl.float32)
    y = tl.load(pointers + partner[None, :], mask=mask, other=0).to(tl.float32)
    return x * cos[None, :] + y * tl.where(d < HALF, -sin, sin)[None, :]


@triton.jit
def capped(score: tensor, cap: tensor, CAPPED: tl.constexpr) -> tensor:
    """Apply the soft cap; ``cap`` has base e, the resulting scores have base 2."""
    if CAPPED:
        return cap * LOG2E * (1 - 2 / (tl.exp2(score * (2 * LOG2E / cap)) + 1))
    return score


@triton.jit
def merge_splits(
    split_acc: tensor, split_stats: tensor, first: tensor, valid_head: tensor,
    active: tensor, stride: tensor, L: tl.constexpr, DIM: tl.constexpr,
    DIM_P: tl.constexpr, SPLITS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Merge the splits of ``L`` heads: accumulator and sum.

    The first split of head l is in slot ``first + l``, the next ``stride`` slots on.
    """
    MAX_SPLITS: tl.constexpr = 8192 // (L * DIM_P)
    SPLIT_TILE: tl.constexpr = MAX_SPLITS if SPLITS > MAX_SPLITS else SPLITS
    slot = (first + tl.arange(0, L))[None, :]
    d = tl.arange(0, DIM_P)
    m_max = tl.full((L,), -1e30, tl.float32)
    l_i = tl.zeros((L,), tl.float32)
    acc = tl.zeros((L, DIM_P), tl.float32)
    for start in range(0, active, SPLIT_TILE):
        split = start + tl.arange(0, SPLIT_TILE)[:, None]
        inside = (split < active) & valid_head[None, :]
        cell = slot + split * stride
        m_i = tl.load(split_stats + cell * 2, mask=inside, other=-1e30)
        p = tl.load(split_stats + cell * 2 + 1, mask=inside, other=0)
        key_index = cell[:, :, None] * DIM + d[None, None, :]
        both = inside[:, :, None] & (d < DIM)[None, None, :]
        values = tl.load(split_acc + key_index, mask=both, other=0)
        m_new = tl.maximum(m_max, tl.max(m_i, 0))
        weight = tl.exp2(m_i - m_new[None, :])
        rescale = tl.exp2(m_max - m_new)
        l_i = l_i * rescale + tl.sum(p * weight, 0)
        acc = acc * rescale[:, None] + tl.sum(values * weight[:, :, None], 0)
        m_max = m_new
    return acc, l_i


@triton.jit
def store_merged(
    out: tensor, split_acc: tensor, split_stats: tensor, first: tensor,
    first_slot: tensor, group_head: tensor, active: tensor, stride: tensor,
    GROUP: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the splits of the heads ``group_head`` and store them from head ``first``
    of ``out`` on. Slots are as for :func:`merge_splits`.
    """
    valid_head = group_head + tl.arange(0, LANES) < GROUP
    values_sum, denominator = merge_splits(
        split_acc, split_stats, first_slot, valid_head, active, stride, LANES, DIM,
        DIM_P, SPLITS,
    )  # fmt: skip
    values_sum = values_sum / tl.where(denominator > 0, denominator, 1)[:, None]
    d = tl.arange(0, DIM_P)
    key_index = (first + tl.arange(0, LANES))[:, None] * DIM + d[None, :]
    tl.store(out + key_index, values_sum, mask=valid_head[:, None] & (d < DIM)[None, :])


@triton.jit
def tile_offsets(
    block: tensor, key_index: tensor, end: tensor, position: tensor, window: tensor,
    kv_head: tensor, d: tensor, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, WINDOWED: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Return which keys of a tile are visible, and their offsets [keys, d]."""
    valid = key_index < end
    if WINDOWED:
        valid = valid & (position - key_index < window)
    slot = (block.to(tl.int64) * SIZE + key_index % SIZE) * KV_HEADS + kv_head
    return valid, slot[:, None] * DIM + d[None, :]


@triton.jit
def accumulate_key(
    x: tensor, key: tensor, value: tensor, visible: tensor, m_i: tensor, l_i: tensor,
    acc: tensor, scale: tensor, cap: tensor, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Accumulate one key [1, d]: the new maximum, sum and accumulator."""
    score = tl.sum(x.to(tl.float32) * key.to(tl.float32), 1)
    score = tl.where(visible, capped(score * scale, cap, CAPPED), -1e30)
    m_new = tl.maximum(m_i, score)
    p = tl.where(visible, tl.exp2(score - m_new), 0.0)
    rescale = tl.exp2(m_i - m_new)
    # Keys and values of padding are undefined, possibly NaN.
    row = tl.where(visible, value.to(tl.float32), 0.0)
    acc = acc * rescale[:, None] + p[:, None] * row[None, :]
    return m_new, l_i * rescale + p, acc


@triton.jit
def accumulate_tile(
    x: tensor, key: tensor, value: tensor, valid: tensor, m_i: tensor, l_i: tensor,
    acc: tensor, scale: tensor, cap: tensor, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Accumulate one tile of keys: the new maximum, sum and accumulator."""
    score = tl.dot(x, tl.trans(key), input_precision="ieee")
    score = capped(score * scale, cap, CAPPED)
    score = tl.where(valid[None, :], score, -1e30)
    m_new = tl.maximum(m_i, tl.max(score, 1))
    p = tl.where(valid[None, :], tl.exp2(score - m_new[:, None]), 0.0)
    rescale = tl.exp2(m_i - m_new)
    acc = acc * rescale[:, None]
    acc += tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return m_new, l_i * rescale + tl.sum(p, 1), acc


@triton.jit
def rope_attend(
    q: tensor, k: tensor, v: tensor, cos: tensor, sin: tensor, k_cache: tensor,
    v_cache: tensor, table: tensor, token_rows: tensor, positions: tensor,
    starts: tensor, used_counts: tensor, writes: tensor, out: tensor, split_acc: tensor,
    split_stats: tensor, counters: tensor, items: tensor, q_stride: tensor,
    k_stride: tensor, v_stride: tensor, width: tensor, scale: tensor, window: tensor,
    cap: tensor, scales: tensor, LISTED: tl.constexpr, SINGLE: tl.constexpr,
    SIZE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    LANES: tl.constexpr, HALF: tl.constexpr, DIM_P: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, M: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, PDL: tl.constexpr,
    PREFETCH: tl.constexpr, UNSPLIT_TILES: tl.constexpr,
    WAITS: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of some heads of one token over one split of its row's keys.

    Keys of this step are read from ``k``, in split 0, and all others from the cache, so
    that no program reads a cache slot that is written in this launch. Of n active
    splits, split s computes every n-th tile of keys from tile s on. The last split to
    finish merges all splits in their order, and resets the counter to 0.
    ``UNSPLIT_TILES`` tiles or fewer are not split. If ``LISTED``, programs take their
    split from ``items``.

    The arrays of the step and, if ``PREFETCH``, the first tile of keys are read before
    the previous kernel has ended, so that kernel must not write them.
    """
    half: tl.constexpr = q.dtype.element_ty
    DIM: tl.constexpr = 2 * HALF
    CHUNKS: tl.constexpr = (GROUP + LANES - 1) // LANES
    # Heads of a token are adjacent programs, since their keys are adjacent.
    chunk = tl.program_id(0) % CHUNKS
    kv_head = tl.program_id(0) // CHUNKS
    if LISTED:
        entry = items + tl.program_id(1) * 4
        token = tl.load(entry).to(tl.int64)
        split = tl.load(entry + 1)
        listed_splits = tl.load(entry + 2)
        first_item = tl.load(entry + 3).to(tl.int64)
        if split >= listed_splits:
            return
    else:
        token = tl.program_id(1).to(tl.int64)
        split = tl.program_id(2)
    row = token
    if not SINGLE:
        row = tl.load(token_rows + token, cache_modifier=CACHE_GLOBAL).to(tl.int64)
    key_index = split * KEYS + tl.arange(0, KEYS)
    if PREFETCH and not WINDOWED:
        # Before the token's position is loaded, on which all else depends.
        inside = key_index < width * SIZE
        entries = table + row * width + key_index // SIZE
        block = tl.load(entries, mask=inside, other=0, cache_modifier=CACHE_GLOBAL)
    position = tl.load(positions + token, cache_modifier=CACHE_GLOBAL).to(tl.int32)
    is_token = token < tl.load(used_counts + 2, cache_modifier=CACHE_GLOBAL)
    # A step with as many rows as tokens may still have several tokens in one row.
    first_token = token
    if not SINGLE:
        first_token = tl.where(
            is_token,
            tl.load(starts + row, cache_modifier=CACHE_GLOBAL).to(tl.int64),
            token,
        )
    cached = position - (token - first_token).to(tl.int32)
    window_start = 0
    if WINDOWED:
        window_start = (
            tl.minimum(tl.maximum(position - window + 1, 0), cached) // KEYS * KEYS
        )
        key_index += window_start
        if PREFETCH:
            entries = table + row * width + key_index // SIZE
            block = tl.load(
                entries, mask=key_index < cached, other=0, cache_modifier=CACHE_GLOBAL
            )
    end = tl.where(is_token, cached, 0)
    tiles = (end - window_start + KEYS - 1) // KEYS
    if LISTED:
        active = listed_splits
    else:
        active = tl.where(tiles <= UNSPLIT_TILES, 1, tl.minimum(tiles, SPLITS))
    end = tl.where(split < active, end, 0)
    d = tl.arange(0, DIM_P)
    inside_dim = d < DIM
    h = d % HALF
    own_slot = (
        tl.load(writes + token, cache_modifier=CACHE_GLOBAL).to(tl.int64) * KV_HEADS
        + kv_head
    )
    if PREFETCH:
        valid, inner = tile_offsets(
            block,
            key_index,
            end,
            position,
            window,
            kv_head,
            d,
            SIZE,
            KV_HEADS,
            DIM,
            WINDOWED,
        )
        inside_tile = valid[:, None] & inside_dim[None, :]
        first_key = tl.load(
            k_cache + inner, mask=inside_tile, other=0, cache_modifier=CACHE_GLOBAL
        )
        first_value = tl.load(
            v_cache + inner, mask=inside_tile, other=0, cache_modifier=CACHE_GLOBAL
        )
    pdl_sync(PDL)
    c = tl.load(cos + token * HALF + h, mask=inside_dim, other=0)
    s = tl.load(sin + token * HALF + h, mask=inside_dim, other=0)

    m = tl.arange(0, M)
    group_head = chunk * LANES + m
    is_head = (m < LANES) & (group_head < GROUP)
    head = kv_head * GROUP + group_head
    x = load_rotated(
        q + token * q_stride + head[:, None] * DIM, c, s,
        is_head[:, None] & inside_dim[None, :], HALF, DIM_P,
    ).to(half)  # fmt: skip
    scale = times(scale, scales, 0)
    m_i = tl.full((M,), -1e30, tl.float32)
    l_i = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DIM_P), tl.float32)
    own_key = k + token * k_stride + kv_head * DIM + tl.zeros((1, 1), tl.int32)
    new_key = load_rotated(own_key, c, s, inside_dim[None, :], HALF, DIM_P)
    new_value = tl.load(
        v + token * v_stride + kv_head * DIM + d, mask=inside_dim, other=0
    )
    new_key, new_value = to_cache(new_key, scales, 0), to_cache(new_value, scales, 1)
    is_writer = inside_dim & (split == 0) & (chunk == 0)
    tl.store(k_cache + own_slot * DIM + d[None, :], new_key, mask=is_writer[None, :])
    tl.store(v_cache + own_slot * DIM + d, new_value, mask=is_writer)
    visible = is_token & (split == 0)
    m_i, l_i, acc = accumulate_key(
        x,
        from_cache(new_key, half),
        from_cache(new_value, half),
        visible,
        m_i,
        l_i,
        acc,
        scale,
        cap,
        CAPPED,
    )
    for other in range(first_token, tl.where(split == 0, token, first_token)):
        other_cos = tl.load(cos + other * HALF + h, mask=inside_dim, other=0)
        other_sin = tl.load(sin + other * HALF + h, mask=inside_dim, other=0)
        other_key = k + other * k_stride + kv_head * DIM + tl.zeros((1, 1), tl.int32)
        new_key = load_rotated(
            other_key, other_cos, other_sin, inside_dim[None, :], HALF, DIM_P
        )
        new_value = tl.load(
            v + other * v_stride + kv_head * DIM + d, mask=inside_dim, other=0
        )
        new_key = to_cache(new_key, scales, 0)
        new_value = to_cache(new_value, scales, 1)
        visible = is_token
        if WINDOWED:
            visible = is_token & (token - other < window)
        m_i, l_i, acc = accumulate_key(
            x,
            from_cache(new_key, half),
            from_cache(new_value, half),
            visible,
            m_i,
            l_i,
            acc,
            scale,
            cap,
            CAPPED,
        )

    begin = window_start + split * KEYS
    if PREFETCH:
        m_i, l_i, acc = accumulate_tile(
            x,
            from_cache(first_key, half),
            from_cache(first_value, half),
            valid,
            m_i,
            l_i,
            acc,
            scale,
            cap,
            CAPPED,
        )
        begin += active * KEYS
    for start in range(begin, end, active * KEYS):
        key_index = start + tl.arange(0, KEYS)
        block = tl.load(
            table + row * width + key_index // SIZE, mask=key_index < end, other=0
        )
        valid, inner = tile_offsets(
            block,
            key_index,
            end,
            position,
            window,
            kv_head,
            d,
            SIZE,
            KV_HEADS,
            DIM,
            WINDOWED,
        )
        inside_tile = valid[:, None] & inside_dim[None, :]
        key = tl.load(k_cache + inner, mask=inside_tile, other=0)
        value = tl.load(v_cache + inner, mask=inside_tile, other=0)
        key, value = from_cache(key, half), from_cache(value, half)
        m_i, l_i, acc = accumulate_tile(
            x, key, value, valid, m_i, l_i, acc, scale, cap, CAPPED
        )

    acc = times(acc, scales, 1)
    slot = token * (KV_HEADS * GROUP) + head
    both = is_head[:, None] & (d < DIM)[None, :]
    if active == 1:
        if split == 0:
            acc = acc / tl.where(l_i > 0, l_i, 1)[:, None]
            tl.store(out + slot[:, None] * DIM + d[None, :], acc, mask=both)
    else:
        if split < active:
            HEADS: tl.constexpr = KV_HEADS * GROUP
            first_head = kv_head * GROUP + chunk * LANES
            # Of a token, [splits, heads].
            first_split = token * SPLITS
            if LISTED:
                first_split = first_item
            slot = (first_split + split) * HEADS + head
            tl.store(split_acc + slot[:, None] * DIM + d[None, :], acc, mask=both)
            tl.store(split_stats + slot * 2, m_i, mask=is_head)
            tl.store(split_stats + slot * 2 + 1, l_i, mask=is_head)
            finish_stores(WAITS)
            counter = counters + token * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(counter, 1, sem="acq_rel") == active - 1:
                tl.store(counter, 0)
                store_merged(
                    out, split_acc, split_stats, token * HEADS + first_head,
                    first_split * HEADS + first_head, chunk * LANES, active, HEADS,
                    GROUP, LANES, DIM, DIM_P, SPLITS,
                )  # fmt: skip
