"""Triton kernels of products with the matrices of experts.

Few slots each read their expert's matrix. Many slots are sorted by expert, and a
program computes a tile of slots of one expert, which follows from the experts' numbers
of tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from inl_torch.triton.matmul.activation import activate_gate


@triton.jit
def weight_pointers(
    weight: tensor, expert: tensor, rows: tensor, at: tensor, N: tl.constexpr,
    K: tl.constexpr,
) -> tensor:  # fmt: skip
    """Pointers to a tile of an expert's matrix [N, K]."""
    return weight + expert * (N * K) + rows[:, None] * K + at[None, :]


@triton.jit
def slot_product(
    x: tensor, ids: tensor, weight: tensor, up_weight: tensor, y: tensor,
    repeated: tensor, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Product of one slot with its expert's matrix, or the gated product with two.

    EXPERTS: number of matrices if ids may be of others, whose slots have zeros; or 0.
    """
    slot = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + slot).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < N
    read = inside
    if EXPERTS:
        read = inside & (expert >= 0) & (expert < EXPERTS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    row = x + (slot // repeated) * K
    for start in range(0, K, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        mask = read[:, None] & (at < K)[None, :]
        a = tl.load(row + at, mask=at < K, other=0).to(tl.float32)[None, :]
        b = tl.load(weight_pointers(weight, expert, rows, at, N, K), mask=mask, other=0)
        acc += b.to(tl.float32) * a
        if GATED:
            b = tl.load(
                weight_pointers(up_weight, expert, rows, at, N, K),
                mask=mask,
                other=0,
            )
            up_acc += b.to(tl.float32) * a
    result = tl.sum(acc, 1)
    if GATED:
        result = activate_gate(result, tl.sum(up_acc, 1), SILU)
    tl.store(y + slot * N + rows, result, mask=inside)


@triton.jit
def slots_weighted_sum(
    x: tensor, ids: tensor, slot_weights: tensor, weight: tensor, y: tensor, k: tensor,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Weighted sum of the products of a token's ``k`` slots.

    EXPERTS: as for :func:`slot_product`.
    """
    token = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = rows < N
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in range(k):
        slot = token * k + index
        expert = tl.load(ids + slot).to(tl.int64)
        weight_of_slot = tl.load(slot_weights + slot)
        read = inside
        if EXPERTS:
            read = inside & (expert >= 0) & (expert < EXPERTS)
        for start in range(0, K, COLUMNS):
            at = start + tl.arange(0, COLUMNS)
            mask = read[:, None] & (at < K)[None, :]
            a = (
                tl.load(x + slot * K + at, mask=at < K, other=0).to(tl.float32)
                * weight_of_slot
            )
            b = tl.load(
                weight_pointers(weight, expert, rows, at, N, K), mask=mask, other=0
            )
            acc += b.to(tl.float32) * a[None, :]
    tl.store(y + token * N + rows, tl.sum(acc, 1), mask=inside)


@triton.jit
def find_tile(
    counts: tensor, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, SLOTS: tl.constexpr
) -> tuple[tensor, tensor, tensor]:
    """Return the expert of a program's tile, and the indices and validity of its slots.

    counts: slots per expert. The expert is at least EXPERTS if there are fewer tiles.
    """
    number = tl.arange(0, EXPERTS_P)
    slots_of_expert = tl.load(counts + number, mask=number < EXPERTS, other=0).to(
        tl.int32
    )
    tiles = (slots_of_expert + SLOTS - 1) // SLOTS
    tile = tl.program_id(0)
    is_before = tl.cumsum(tiles, 0) <= tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    tile_of_expert = tile - tl.sum(tl.where(is_before, tiles, 0), 0)
    first = tl.sum(tl.where(is_before, slots_of_expert, 0), 0)
    expert_slots = tl.sum(tl.where(number == expert, slots_of_expert, 0), 0)
    sorted_index = tile_of_expert * SLOTS + tl.arange(0, SLOTS)
    return expert, (first + sorted_index).to(tl.int64), sorted_index < expert_slots


@triton.jit
def tile_product(
    x: tensor, order: tensor, counts: tensor, weight: tensor, up_weight: tensor,
    y: tensor, repeated: tensor, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    GATHERS: tl.constexpr, SCATTERS: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Product of ``SLOTS`` sorted slots of one expert with ``ROWS`` rows of its matrix.

    order: sorted slot ids. GATHERS, SCATTERS: whether the rows of ``x``, and of ``y``,
    are indexed by slot; otherwise they are sorted.
    """
    expert, sorted_index, valid = find_tile(counts, EXPERTS, EXPERTS_P, SLOTS)
    if expert < EXPERTS:
        slot = tl.load(order + sorted_index, mask=valid, other=0).to(tl.int64)
        source = sorted_index
        if GATHERS:
            source = slot // repeated
        rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = rows < N
        at = tl.arange(0, COLUMNS)
        acc = tl.zeros((SLOTS, ROWS), tl.float32)
        up_acc = tl.zeros((SLOTS, ROWS), tl.float32)
        base = expert.to(tl.int64) * (N * K)
        for start in range(0, K, COLUMNS):
            column = start + at
            in_k = column < K
            a = tl.load(
                x + source[:, None] * K + column[None, :],
                mask=valid[:, None] & in_k[None, :], other=0,
            )  # fmt: skip
            pointers = base + rows[None, :] * K + column[:, None]
            mask = inside[None, :] & in_k[:, None]
            b = tl.load(weight + pointers, mask=mask, other=0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            if GATED:
                b = tl.load(up_weight + pointers, mask=mask, other=0)
                up_acc = tl.dot(a, b, up_acc, input_precision="ieee")
        if GATED:
            acc = activate_gate(acc, up_acc, SILU)
        target = sorted_index
        if SCATTERS:
            target = slot
        pointers = y + target[:, None] * N + rows[None, :]
        tl.store(pointers, acc, mask=valid[:, None] & inside[None, :])


@triton.jit
def combine(
    y: tensor, slot_weights: tensor, ids: tensor, out: tensor, k: tensor, width: tensor,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr,
) -> None:  # fmt: skip
    """Weighted sum of a token's slots, in float32.

    EXPERTS: number of experts of which slots are summed; 0 sums all, without the ids.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(k):
        slot = token * k + index
        read = mask
        if EXPERTS:
            expert = tl.load(ids + slot)
            read = mask & (expert >= 0) & (expert < EXPERTS)
        values = tl.load(y + slot * width + at, mask=read, other=0).to(tl.float32)
        total += values * tl.load(slot_weights + slot)
    tl.store(out + token * width + at, total, mask=mask)
