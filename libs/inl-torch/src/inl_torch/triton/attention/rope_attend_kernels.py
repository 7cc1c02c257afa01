"""The programs behind :mod:`inl_torch.triton.attention.rope_attend`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.attention.tiles import LOG2E
from inl_torch.triton.pdl import follow

PAST = tl.constexpr(".cg")
"""Where to load from ahead of time: past the first cache, which may hold what the step
before left."""


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
def tile_at(
    home: tensor, at: tensor, end: tensor, place: tensor, window: tensor,
    kv_head: tensor, d: tensor, SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, WINDOWED: tl.constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Which keys of a tile are attended to, and where each lies [keys, d]."""
    there = at < end
    if WINDOWED:
        there = there & (place - at < window)
    cell = (home.to(tl.int64) * SIZE + at % SIZE) * KV_HEADS + kv_head
    return there, cell[:, None] * DIM + d[None, :]


@triton.jit
def near_added(
    x: tensor, key: tensor, value: tensor, shown: tensor, top: tensor, total: tensor,
    result: tensor, scale: tensor, cap: tensor, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Attend to one key [1, d]: the new highest scores, masses and sums."""
    score = tl.sum(x.to(tl.float32) * key.to(tl.float32), 1)
    score = tl.where(shown, capped(score * scale, cap, CAPPED), -1e30)
    higher = tl.maximum(top, score)
    mass = tl.where(shown, tl.exp2(score - higher), 0.0)
    fade = tl.exp2(top - higher)
    # Keys and values of padding are anybody's: no product with them.
    row = tl.where(shown, value.to(tl.float32), 0.0)
    result = result * fade[:, None] + mass[:, None] * row[None, :]
    return higher, total * fade + mass, result


@triton.jit
def tile_added(
    x: tensor, key: tensor, value: tensor, there: tensor, top: tensor, total: tensor,
    result: tensor, scale: tensor, cap: tensor, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Attend to one tile of keys: the new highest scores, masses and sums."""
    score = tl.dot(x, tl.trans(key), input_precision="ieee")
    score = capped(score * scale, cap, CAPPED)
    score = tl.where(there[None, :], score, -1e30)
    higher = tl.maximum(top, tl.max(score, 1))
    mass = tl.where(there[None, :], tl.exp2(score - higher[:, None]), 0.0)
    fade = tl.exp2(top - higher)
    result = result * fade[:, None]
    result += tl.dot(mass.to(value.dtype), value, input_precision="ieee")
    return higher, total * fade + tl.sum(mass, 1), result


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
    EARLY: tl.constexpr, AHEAD: tl.constexpr, ALONE: tl.constexpr,
) -> None:  # fmt: skip
    """Attend some heads of one token to one split of its row's keys.

    Keys of this step come from ``k``, in split 0, and the others were cached by earlier
    steps: nobody reads a cell that is written here. Of n active splits, split s takes
    every n-th tile of keys from tile s on. The last split of some heads to arrive adds
    them up, in their own order, and leaves ``arrivals`` at zero. ``ALONE`` tiles or
    fewer are one program's.

    The step's own facts, and ``AHEAD`` the first tile of keys, are read before the
    kernel ahead has ended, so that must not be the one that writes them.
    """
    kind = k_cache.dtype.element_ty
    DIM: tl.constexpr = 2 * HALF
    CHUNKS: tl.constexpr = (SHARED + LANES - 1) // LANES
    # The heads of a token run side by side, for their keys lie so.
    chunk = tl.program_id(0) % CHUNKS
    kv_head = tl.program_id(0) // CHUNKS
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = token
    if not ONE:
        row = tl.load(token_rows + token, cache_modifier=PAST).to(tl.int64)
    at = split * KEYS + tl.arange(0, KEYS)
    if AHEAD and not WINDOWED:
        # Ahead of the token's place, on which all else depends.
        inside = at < width * SIZE
        entries = table + row * width + at // SIZE
        home = tl.load(entries, mask=inside, other=0, cache_modifier=PAST)
    place = tl.load(positions + token, cache_modifier=PAST).to(tl.int32)
    real = tl.program_id(1) < tl.load(used + 2, cache_modifier=PAST)
    # A step of as many rows as tokens may still hold several tokens of one row.
    oldest = token
    if not ONE:
        oldest = tl.where(
            real, tl.load(starts + row, cache_modifier=PAST).to(tl.int64), token
        )
    cached = place - (token - oldest).to(tl.int32)
    low = 0
    if WINDOWED:
        low = tl.minimum(tl.maximum(place - window + 1, 0), cached) // KEYS * KEYS
        at += low
        if AHEAD:
            entries = table + row * width + at // SIZE
            home = tl.load(entries, mask=at < cached, other=0, cache_modifier=PAST)
    end = tl.where(real, cached, 0)
    tiles = (end - low + KEYS - 1) // KEYS
    active = tl.where(tiles <= ALONE, 1, tl.minimum(tiles, SPLITS))
    end = tl.where(split < active, end, 0)
    d = tl.arange(0, DIM_P)
    turned = d < DIM
    h = d % HALF
    home_cell = (
        tl.load(writes + token, cache_modifier=PAST).to(tl.int64) * KV_HEADS + kv_head
    )
    if AHEAD:
        there, inner = tile_at(
            home, at, end, place, window, kv_head, d, SIZE, KV_HEADS, DIM, WINDOWED
        )
        seen = there[:, None] & turned[None, :]
        first_key = tl.load(k_cache + inner, mask=seen, other=0, cache_modifier=PAST)
        first_value = tl.load(v_cache + inner, mask=seen, other=0, cache_modifier=PAST)
    follow(EARLY)
    c = tl.load(cos + token * HALF + h, mask=turned, other=0)
    s = tl.load(sin + token * HALF + h, mask=turned, other=0)

    m = tl.arange(0, M)
    lane = chunk * LANES + m
    mine = (m < LANES) & (lane < SHARED)
    head = kv_head * SHARED + lane
    x = rotated(
        q + token * q_stride + head[:, None] * DIM, c, s,
        mine[:, None] & turned[None, :], HALF, DIM_P,
    ).to(kind)  # fmt: skip
    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    result = tl.zeros((M, DIM_P), tl.float32)
    own = k + token * k_stride + kv_head * DIM + tl.zeros((1, 1), tl.int32)
    near = rotated(own, c, s, turned[None, :], HALF, DIM_P).to(kind)
    new = tl.load(v + token * v_stride + kv_head * DIM + d, mask=turned, other=0)
    owned = turned & (split == 0) & (chunk == 0)
    tl.store(k_cache + home_cell * DIM + d[None, :], near, mask=owned[None, :])
    tl.store(v_cache + home_cell * DIM + d, new, mask=owned)
    shown = real & (split == 0)
    top, total, result = near_added(
        x, near, new, shown, top, total, result, scale, cap, CAPPED
    )
    for other in range(oldest, tl.where(split == 0, token, oldest)):
        turn = tl.load(cos + other * HALF + h, mask=turned, other=0)
        lift = tl.load(sin + other * HALF + h, mask=turned, other=0)
        theirs = k + other * k_stride + kv_head * DIM + tl.zeros((1, 1), tl.int32)
        near = rotated(theirs, turn, lift, turned[None, :], HALF, DIM_P).to(kind)
        new = tl.load(v + other * v_stride + kv_head * DIM + d, mask=turned, other=0)
        shown = real
        if WINDOWED:
            shown = real & (token - other < window)
        top, total, result = near_added(
            x, near, new, shown, top, total, result, scale, cap, CAPPED
        )

    begin = low + split * KEYS
    if AHEAD:
        top, total, result = tile_added(
            x, first_key, first_value, there, top, total, result, scale, cap, CAPPED
        )
        begin += active * KEYS
    for start in range(begin, end, active * KEYS):
        at = start + tl.arange(0, KEYS)
        home = tl.load(table + row * width + at // SIZE, mask=at < end, other=0)
        there, inner = tile_at(
            home, at, end, place, window, kv_head, d, SIZE, KV_HEADS, DIM, WINDOWED
        )
        seen = there[:, None] & turned[None, :]
        key = tl.load(k_cache + inner, mask=seen, other=0)
        value = tl.load(v_cache + inner, mask=seen, other=0)
        top, total, result = tile_added(
            x, key, value, there, top, total, result, scale, cap, CAPPED
        )

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
