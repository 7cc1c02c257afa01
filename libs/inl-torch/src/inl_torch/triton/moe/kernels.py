"""Programs that multiply rows with the matrices of their experts.

A few slots each read their own expert's matrix. Many are sorted by expert, and a
program takes a tile of one expert's: it finds out whose from the number of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.matmul.activation import gated


@triton.jit
def cells_of(
    weight: tensor, expert: tensor, rows: tensor, at: tensor, N: tl.constexpr,
    K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Places of some rows of an expert's matrix [N, K]."""
    return weight + expert * (N * K) + rows[:, None] * K + at[None, :]


@triton.jit
def slot_product(
    x: tensor, ids: tensor, weight: tensor, other: tensor, y: tensor, repeated: tensor,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """One slot's product with its expert's matrix, or with two of them, gated."""
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < N
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    line = x + (slot // repeated) * K
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (at < K)[None, :]
        a = tl.load(line + at, mask=at < K, other=0).to(tl.float32)[None, :]
        b = tl.load(cells_of(weight, expert, rows, at, N, K), mask=mask, other=0)
        sums += b.to(tl.float32) * a
        if GATED:
            b = tl.load(cells_of(other, expert, rows, at, N, K), mask=mask, other=0)
            ups += b.to(tl.float32) * a
    result = tl.sum(sums, 1)
    if GATED:
        result = gated(result, tl.sum(ups, 1), SILU)
    tl.store(y + slot * N + rows, result, mask=inside)


@triton.jit
def slots_sum(
    x: tensor, ids: tensor, shares: tensor, weight: tensor, y: tensor, k: tensor,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """The products of a token's ``k`` slots, each times its share, summed."""
    token = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < N
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for turn in range(k):
        slot = token * k + turn
        expert = tl.load(ids + slot).to(tl.int64)
        share = tl.load(shares + slot)
        for start in range(0, K, COLUMNS):
            at = start + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (at < K)[None, :]
            a = tl.load(x + slot * K + at, mask=at < K, other=0).to(tl.float32) * share
            b = tl.load(cells_of(weight, expert, rows, at, N, K), mask=mask, other=0)
            sums += b.to(tl.float32) * a[None, :]
    tl.store(y + token * N + rows, tl.sum(sums, 1), mask=inside)


@triton.jit
def tile_product(
    x: tensor, order: tensor, counts: tensor, weight: tensor, other: tensor, y: tensor,
    repeated: tensor, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr, GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """``SLOTS`` sorted slots of one expert times ``ROWS`` rows of its matrix.

    order: the slots, sorted. counts: slots of each expert. Rows of ``x`` are found by
    their slot where GATHERS, else they are sorted; so are those of ``y``.
    """
    number = tl.arange(0, EXPERTS_P)
    mine = tl.load(counts + number, mask=number < EXPERTS, other=0).to(tl.int32)
    tiles = (mine + SLOTS - 1) // SLOTS
    ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    before = ends <= tile
    expert = tl.sum(before.to(tl.int32), 0)
    if expert < EXPERTS:
        within = tile - tl.sum(tl.where(before, tiles, 0), 0)
        first = tl.sum(tl.where(before, mine, 0), 0)
        held = tl.sum(tl.where(number == expert, mine, 0), 0)
        place = within * SLOTS + tl.arange(0, SLOTS)
        known = place < held
        place = (first + place).to(tl.int64)
        slot = tl.load(order + place, mask=known, other=0).to(tl.int64)
        source = place
        if GATHERS:
            source = slot // repeated
        rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < N
        at = tl.arange(0, COLUMNS)
        sums = tl.zeros((SLOTS, ROWS), tl.float32)
        ups = tl.zeros((SLOTS, ROWS), tl.float32)
        base = expert.to(tl.int64) * (N * K)
        for start in range(0, K, COLUMNS):
            column = start + at
            some = column < K
            a = tl.load(
                x + source[:, None] * K + column[None, :],
                mask=known[:, None] & some[None, :], other=0,
            )  # fmt: skip
            cells = base + rows[None, :] * K + column[:, None]
            mask = inside[None, :] & some[:, None]
            b = tl.load(weight + cells, mask=mask, other=0)
            sums = tl.dot(a, b, sums, input_precision="ieee")
            if GATED:
                b = tl.load(other + cells, mask=mask, other=0)
                ups = tl.dot(a, b, ups, input_precision="ieee")
        if GATED:
            sums = gated(sums, ups, SILU)
        target = place
        if SCATTERS:
            target = slot
        cells = y + target[:, None] * N + rows[None, :]
        tl.store(cells, sums, mask=known[:, None] & inside[None, :])


@triton.jit
def combine(
    y: tensor, shares: tensor, out: tensor, k: tensor, width: tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Sum a token's slots, each times its share, in float32."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in range(k):
        slot = token * k + turn
        part = tl.load(y + slot * width + at, mask=mask, other=0).to(tl.float32)
        total += part * tl.load(shares + slot)
    tl.store(out + token * width + at, total, mask=mask)
