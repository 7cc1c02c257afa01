"""The programs behind :mod:`inl_torch.triton.attention.attention`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit
def attend(
    q: tensor, k: tensor, v: tensor, table: tensor, token_rows: tensor,
    positions: tensor, singles: tensor, out: tensor, sums: tensor, q_stride: tensor,
    width: tensor, scale: tensor, window: tensor, cap: tensor, SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr, SHARED: tl.constexpr, LANES: tl.constexpr,
    DIM: tl.constexpr, DIM_P: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    M: tl.constexpr, MIXED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
) -> None:  # fmt: skip
    """Attend one token, alone in its row, to one split of its row's keys.

    Of a mixed step only the first ``singles`` tokens are such; the others are left
    to :func:`inl_torch.triton.attention.tiles.attend_tiles`.
    """
    CHUNKS: tl.constexpr = (SHARED + LANES - 1) // LANES
    # The heads of a token run side by side, for their keys lie so.
    kv_head = tl.program_id(0) // CHUNKS
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    real = token < tl.load(singles)
    if MIXED:  # noqa: SIM102
        if not real:
            return
    row = tl.load(token_rows + token).to(tl.int64)
    m = tl.arange(0, M)
    lane = (tl.program_id(0) % CHUNKS) * LANES + m
    mine = (m < LANES) & (lane < SHARED)
    place = tl.where(real, tl.load(positions + token).to(tl.int32), -1)
    head = kv_head * SHARED + lane
    d = tl.arange(0, DIM_P)
    cells = token * q_stride + head[:, None] * DIM + d[None, :]
    x = tl.load(q + cells, mask=mine[:, None] & (d < DIM)[None, :], other=0)

    last = place + 1
    low = 0
    if WINDOWED:
        low = tl.maximum(last - window, 0)
    share = ((last - low + KEYS - 1) // KEYS + SPLITS - 1) // SPLITS * KEYS
    begin = low + split * share
    end = tl.minimum(begin + share, last)

    top = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    result = tl.zeros((M, DIM_P), tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        there = at < end
        home = tl.load(table + row * width + at // SIZE, mask=there, other=0)
        cell = home.to(tl.int64) * SIZE + at % SIZE
        inner = (cell * KV_HEADS + kv_head)[:, None] * DIM + d[None, :]
        both = there[:, None] & (d < DIM)[None, :]
        key = tl.load(k + inner, mask=both, other=0)
        value = tl.load(v + inner, mask=both, other=0)
        score = tl.dot(x, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            score = cap * (1 - 2 / (tl.exp(2 * score / cap) + 1))
        score = tl.where(there[None, :], score, -1e30)
        higher = tl.maximum(top, tl.max(score, 1))
        mass = tl.where(there[None, :], tl.exp(score - higher[:, None]), 0.0)
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(mass, 1)
        result = result * fade[:, None]
        result += tl.dot(mass.to(value.dtype), value, input_precision="ieee")
        top = higher

    cell = token * (KV_HEADS * SHARED) + head
    both = mine[:, None] & (d < DIM)[None, :]
    if SPLITS == 1:
        result = result / tl.where(total > 0, total, 1)[:, None]
        tl.store(out + cell[:, None] * DIM + d[None, :], result, mask=both)
    else:
        cell = cell * SPLITS + split
        tl.store(out + cell[:, None] * DIM + d[None, :], result, mask=both)
        tl.store(sums + cell * 2, top, mask=mine)
        tl.store(sums + cell * 2 + 1, total, mask=mine)


@triton.jit
def combine(
    part: tensor, sums: tensor, singles: tensor, out: tensor, HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_P: tl.constexpr, SPLITS: tl.constexpr, MIXED: tl.constexpr,
) -> None:  # fmt: skip
    """Add the splits of one head of one token, each by its share of the mass."""
    cell = tl.program_id(0).to(tl.int64)
    if MIXED:  # noqa: SIM102
        if cell // HEADS >= tl.load(singles):
            return
    split = cell * SPLITS + tl.arange(0, SPLITS)
    d = tl.arange(0, DIM_P)
    top = tl.load(sums + split * 2)
    total = tl.load(sums + split * 2 + 1)
    weight = tl.exp(top - tl.max(top, 0))
    mass = tl.sum(total * weight, 0)
    inside = d < DIM
    at = split[:, None] * DIM + d[None, :]
    values = tl.load(part + at, mask=inside[None, :], other=0)
    result = tl.sum(values * weight[:, None], 0) / tl.where(mass > 0, mass, 1)
    tl.store(out + cell * DIM + d, result, mask=inside)
