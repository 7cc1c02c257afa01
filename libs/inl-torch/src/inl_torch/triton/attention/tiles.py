"""The program behind prompts' attention: a tile of queries and all heads of a group.

Queries of one row and the heads that share its keys are the rows of one matrix, so that
a tile is full whatever the size of the group. Scores are powers of two: the logarithm's
base is a part of the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def met(
    x: tensor, k: tensor, v: tensor, pages: tensor, at: tensor, place: tensor,
    last: tensor, kv_head: tensor, scale: tensor, window: tensor, cap: tensor,
    top: tensor, total: tensor, result: tensor, SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
) -> tuple[tensor, tensor, tensor]:  # fmt: skip
    """Let queries at ``place`` meet the keys ``at``, and add what they find."""
    d = tl.arange(0, DIM_P)
    if MASKED:
        there = at < last
        home = tl.load(pages + at // SIZE, mask=there, other=0).to(tl.int64)
    else:
        home = tl.load(pages + at // SIZE).to(tl.int64)
    cell = (home * SIZE + at % SIZE) * KV_HEADS + kv_head
    inner = cell[:, None] * DIM + d[None, :]
    if MASKED:
        both = there[:, None] & (d < DIM)[None, :]
        key = tl.load(k + inner, mask=both, other=0)
        value = tl.load(v + inner, mask=both, other=0)
    elif DIM < DIM_P:
        both = (d < DIM)[None, :]
        key = tl.load(k + inner, mask=both, other=0)
        value = tl.load(v + inner, mask=both, other=0)
    else:
        key = tl.load(k + inner)
        value = tl.load(v + inner)
    score = tl.dot(x, tl.trans(key), input_precision="ieee")
    if CAPPED:
        # tanh by its exponential; the scale, natural here, is one afterwards.
        score = cap * LOG2E * (1 - 2 / (tl.exp2(score * (scale * 2 * LOG2E / cap)) + 1))
        scale = 1.0
    if MASKED:
        seen = (at[None, :] <= place[:, None]) & there[None, :]
        if WINDOWED:
            seen = seen & (place[:, None] - at[None, :] < window)
        score = tl.where(seen, score, -1e30)
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    mass = tl.exp2(score * scale - higher[:, None])
    if WINDOWED:
        # Where no key of a tile is seen, the highest score is no score.
        mass = tl.where(seen, mass, 0.0)
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(mass, 1)
    result = result * fade[:, None]
    result = tl.dot(mass.to(value.dtype), value, acc=result, input_precision="ieee")
    return higher, total, result


@triton.jit
def attend_tiles(
    q: tensor, k: tensor, v: tensor, table: tensor, positions: tensor, work: tensor,
    out: tensor, q_stride: tensor, width: tensor, scale: tensor, window: tensor,
    cap: tensor, SIZE: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr,
    LANES: tl.constexpr, DIM: tl.constexpr, DIM_P: tl.constexpr, KEYS: tl.constexpr,
    M: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
) -> None:  # fmt: skip
    """Attend one tile of the list ``work`` to all the keys that it sees.

    Row m of the tile is head ``m % LANES`` of its query ``m // LANES``. Tiles of row -1
    are padding, which gets zeros.
    """
    CHUNKS: tl.constexpr = (SHARED + LANES - 1) // LANES
    kv_head = tl.program_id(0) // CHUNKS
    tile = tl.program_id(1)
    row = tl.load(work + tile * 3).to(tl.int64)
    first = tl.load(work + tile * 3 + 1).to(tl.int64)
    count = tl.load(work + tile * 3 + 2)
    if count == 0:
        return
    m = tl.arange(0, M)
    lane = (tl.program_id(0) % CHUNKS) * LANES + m % LANES
    query = m // LANES
    mine = (query < count) & (lane < SHARED)
    head = kv_head * SHARED + lane
    token = first + query
    d = tl.arange(0, DIM_P)
    both = mine[:, None] & (d < DIM)[None, :]
    cells = token[:, None] * q_stride + head[:, None] * DIM + d[None, :]
    x = tl.load(q + cells, mask=both, other=0)
    # Padding ends before the first key.
    begin = tl.where(row < 0, -count, tl.load(positions + first).to(tl.int32))
    last = begin + count
    place = begin + query
    pages = table + row * width
    near = tl.arange(0, KEYS)
    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    result = tl.zeros((M, DIM_P), tl.float32)
    if WINDOWED:
        low = tl.maximum(begin - window + 1, 0) // KEYS * KEYS
    else:
        # Every query of the tile sees the keys before this one.
        low = tl.maximum(begin + 1, 0) // KEYS * KEYS
        for start in range(0, low, KEYS):
            top, total, result = met(
                x, k, v, pages, start + near, place, last, kv_head, scale, window, cap,
                top, total, result, SIZE, KV_HEADS, DIM, DIM_P, False, False, CAPPED,
            )  # fmt: skip
    for start in range(low, last, KEYS):
        top, total, result = met(
            x, k, v, pages, start + near, place, last, kv_head, scale, window, cap, top,
            total, result, SIZE, KV_HEADS, DIM, DIM_P, True, WINDOWED, CAPPED,
        )  # fmt: skip
    result = result / tl.where(total > 0, total, 1)[:, None]
    cell = token * (KV_HEADS * SHARED) + head
    tl.store(out + cell[:, None] * DIM + d[None, :], result, mask=both)
