"""The programs behind :mod:`inl_torch.triton.rope_attend`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.attention_tiles import LOG2E
from inl_torch.triton.programs import follow

ALONE = tl.constexpr(3)
"""Tiles of keys that one program attends to sooner than two could add up theirs."""


@triton.jit
def rotated(
    cells: tensor, cos: tensor, sin: tensor, mask: tensor, HALF: tl.constexpr,
    DIM_P: tl.constexpr,
) -> tensor:  # fmt: skip
    """Heads that begin at ``cells`` [n, 1], turned in float32: [n, DIM_P]."""
    d = tl.arange(0, DIM_P)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    x = tl.load(cells + d[None, :], mask=mask, other=0).to(tl.float32)
    y = tl.load(cells + partner[None, :], mask=mask, other=0).to(tl.float32)
    return x * cos[None, :] + y * tl.where(d < HALF, -sin, sin)[None, :]


@triton.jit
def capped(score: tensor, cap: tensor, CAPPED: tl.constexpr) -> tensor:
    """Bound scores softly; ``cap`` is natural, scores are powers of two after it."""
    if CAPPED:
        return cap * LOG2E * (1 - 2 / (tl.exp2(score * (2 * LOG2E / cap)) + 1))
    return score


@triton.jit
def merged(
    part: tensor, masses: tensor, first: tensor, held: tensor, active: tensor,
    L: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, SPLITS: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Add up the splits of ``L`` heads from ``first`` on, each by its share."""
    ROOM: tl.constexpr = 8192 // (L * DIM_P)
    AT_ONCE: tl.constexpr = ROOM if SPLITS > ROOM else SPLITS
    cell = (first + tl.arange(0, L))[None, :] * SPLITS
    d = tl.arange(0, DIM_P)
    highest = tl.full((L,), -1e30, tl.float32)
    total = tl.zeros((L,), tl.float32)
    result = tl.zeros((L, DIM_P), tl.float32)
    for start in range(0, active, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)[:, None]
        inside = (split < active) & held[None, :]
        top = tl.load(masses + (cell + split) * 2, mask=inside, other=-1e30)
        mass = tl.load(masses + (cell + split) * 2 + 1, mask=inside, other=0)
        at = (cell + split)[:, :, None] * DIM + d[None, None, :]
        both = inside[:, :, None] & (d < DIM)[None, None, :]
        values = tl.load(part + at, mask=both, other=0)
        peak = tl.maximum(highest, tl.max(top, 0))
        share = tl.exp2(top - peak[None, :])
        fade = tl.exp2(highest - peak)
        total = total * fade + tl.sum(mass * share, 0)
        result = result * fade[:, None] + tl.sum(values * share[:, :, None], 0)
        highest = peak
    return result, total


@triton.jit
def finish(
    out: tensor, part: tensor, masses: tensor, first: tensor, lane: tensor,
    active: tensor, SHARED: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr,
    DIM_P: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum of the splits of the heads ``lane``, the first of which is cell
    ``first`` of ``out``.
    """
    held = lane + tl.arange(0, LANES) < SHARED
    sums, whole = merged(part, masses, first, held, active, LANES, DIM, DIM_P, SPLITS)
    sums = sums / tl.where(whole > 0, whole, 1)[:, None]
    d = tl.arange(0, DIM_P)
    at = (first + tl.arange(0, LANES))[:, None] * DIM + d[None, :]
    tl.store(out + at, sums, mask=held[:, None] & (d < DIM)[None, :])


@triton.jit
def rope_attend(
    q: tensor, k: tensor, v: tensor, cos: tensor, sin: tensor, k_cache: tensor,
    v_cache: tensor, table: tensor, token_rows: tensor, positions: tensor,
    starts: tensor, used: tensor, writes: tensor, out: tensor, part: tensor,
    masses: tensor, arrivals: tensor, q_stride: tensor, k_stride: tensor,
    v_stride: tensor, width: tensor, scale: tensor, window: tensor, cap: tensor,
    ONE: tl.constexpr, SIZE: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr,
    LANES: tl.constexpr, HALF: tl.constexpr, DIM_P: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, M: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Attend some heads of one token to one split of its row's keys.

    Keys of this step come from ``k``, in split 0, and the others were cached by earlier
    steps: nobody reads a cell that is written here. Of n active splits, split s takes
    every n-th tile of keys from tile s on. The last split of some heads to arrive adds
    them up, in their own order, and leaves ``arrivals`` at zero.
    """
    follow(EARLY)
    DIM: tl.constexpr = 2 * HALF
    CHUNKS: tl.constexpr = (SHARED + LANES - 1) // LANES
    # The heads of a token run side by side, for their keys lie so.
    chunk = tl.program_id(0) % CHUNKS
    kv_head = tl.program_id(0) // CHUNKS
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = token
    if not ONE:
        row = tl.load(token_rows + token).to(tl.int64)
    at = split * KEYS + tl.arange(0, KEYS)
    if not WINDOWED:
        # Ahead of the token's place, on which all else depends.
        inside = at < width * SIZE
        home = tl.load(table + row * width + at // SIZE, mask=inside, other=0)
    place = tl.load(positions + token).to(tl.int32)
    real = tl.program_id(1) < tl.load(used + 2)
    kind = k_cache.dtype.element_ty
    m = tl.arange(0, M)
    lane = chunk * LANES + m
    mine = (m < LANES) & (lane < SHARED)
    head = kv_head * SHARED + lane
    d = tl.arange(0, DIM_P)
    turned = d < DIM
    h = d % HALF
    c = tl.load(cos + token * HALF + h, mask=turned, other=0)
    s = tl.load(sin + token * HALF + h, mask=turned, other=0)
    x = rotated(
        q + token * q_stride + head[:, None] * DIM, c, s,
        mine[:, None] & turned[None, :], HALF, DIM_P,
    ).to(kind)  # fmt: skip

    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    result = tl.zeros((M, DIM_P), tl.float32)
    # A step of as many rows as tokens may still hold several tokens of one row.
    oldest = token
    if not ONE:
        oldest = tl.where(real, tl.load(starts + row).to(tl.int64), token)
    newest = tl.where(split == 0, token + 1, oldest)
    for other in range(oldest, newest):
        turn = tl.load(cos + other * HALF + h, mask=turned, other=0)
        lift = tl.load(sin + other * HALF + h, mask=turned, other=0)
        near = rotated(
            k + other * k_stride + kv_head * DIM + tl.zeros((1, 1), tl.int32), turn,
            lift, turned[None, :], HALF, DIM_P,
        ).to(kind)  # fmt: skip
        new = tl.load(v + other * v_stride + kv_head * DIM + d, mask=turned, other=0)
        owned = turned & (other == token) & (chunk == 0)
        home_cell = tl.load(writes + token).to(tl.int64) * KV_HEADS + kv_head
        tl.store(k_cache + home_cell * DIM + d[None, :], near, mask=owned[None, :])
        tl.store(v_cache + home_cell * DIM + d, new, mask=owned)
        fresh = tl.sum(x.to(tl.float32) * near.to(tl.float32), 1)
        fresh = capped(fresh * scale, cap, CAPPED)
        shown = real
        if WINDOWED:
            shown = real & (token - other < window)
        fresh = tl.where(shown, fresh, -1e30)
        peak = tl.maximum(top, fresh)
        weight = tl.where(shown, tl.exp2(fresh - peak), 0.0)
        kept = tl.exp2(top - peak)
        total = total * kept + weight
        result = result * kept[:, None]
        # Keys and values of padding are anybody's: no product with them.
        value_row = tl.where(shown, new.to(tl.float32), 0.0)
        result += weight[:, None] * value_row[None, :]
        top = peak

    cached = place - (token - oldest).to(tl.int32)
    low = 0
    if WINDOWED:
        low = tl.minimum(tl.maximum(place - window + 1, 0), cached) // KEYS * KEYS
        at += low
        home = tl.load(table + row * width + at // SIZE, mask=at < cached, other=0)
    end = tl.where(real, cached, 0)
    tiles = (end - low + KEYS - 1) // KEYS
    active = tl.where(tiles <= ALONE, 1, tl.minimum(tiles, SPLITS))
    end = tl.where(split < active, end, 0)
    for start in range(low + split * KEYS, end, active * KEYS):
        at = start + tl.arange(0, KEYS)
        there = at < end
        if WINDOWED:
            there = there & (place - at < window)
        cell = (home.to(tl.int64) * SIZE + at % SIZE) * KV_HEADS + kv_head
        inner = cell[:, None] * DIM + d[None, :]
        seen = there[:, None] & turned[None, :]
        key = tl.load(k_cache + inner, mask=seen, other=0)
        value = tl.load(v_cache + inner, mask=seen, other=0)
        score = tl.dot(x, tl.trans(key), input_precision="ieee")
        score = capped(score * scale, cap, CAPPED)
        score = tl.where(there[None, :], score, -1e30)
        higher = tl.maximum(top, tl.max(score, 1))
        mass = tl.where(there[None, :], tl.exp2(score - higher[:, None]), 0.0)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(mass, 1)
        result = result * fade[:, None]
        result += tl.dot(mass.to(value.dtype), value, input_precision="ieee")
        top = higher
        at += active * KEYS
        home = tl.load(table + row * width + at // SIZE, mask=at < end, other=0)

    cell = token * (KV_HEADS * SHARED) + head
    both = mine[:, None] & (d < DIM)[None, :]
    if active == 1:
        if split == 0:
            result = result / tl.where(total > 0, total, 1)[:, None]
            tl.store(out + cell[:, None] * DIM + d[None, :], result, mask=both)
    else:
        if split < active:
            cell = cell * SPLITS + split
            tl.store(part + cell[:, None] * DIM + d[None, :], result, mask=both)
            tl.store(masses + cell * 2, top, mask=mine)
            tl.store(masses + cell * 2 + 1, total, mask=mine)
            tl.debug_barrier()
            arrival = arrivals + token * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(arrival, 1, sem="acq_rel") == active - 1:
                tl.store(arrival, 0)
                first_cell = token * (KV_HEADS * SHARED) + kv_head * SHARED
                finish(
                    out, part, masses, first_cell + chunk * LANES, chunk * LANES,
                    active, SHARED, LANES, DIM, DIM_P, SPLITS,
                )  # fmt: skip
