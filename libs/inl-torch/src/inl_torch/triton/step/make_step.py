"""From one message to the arrays of a step, in two launches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.message import (
    ROW_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    USED_COUNTS,
    layout,
)
from inl.spec.step import Bucket, Step, Tables
from inl_torch.triton.common import PREFERENCE, power
from inl_torch.triton.pdl import follow
from inl_torch.triton.tuning import Tuning

MOST_ROWS = 4096
"""Rows that one program adds the counts of."""

TOKENS = 128
"""Tokens of a program."""

ROW_SLOT = tl.constexpr(ROW_WORD.slot)
ROW_COUNT = tl.constexpr(ROW_WORD.token_count)
ROW_UNIFORMS = tl.constexpr(ROW_WORD.uniforms)
UPDATE_SIZE = tl.constexpr(UPDATE_WORDS)
UPDATE_GROUP = tl.constexpr(UPDATE_WORD.group)
UPDATE_SLOT = tl.constexpr(UPDATE_WORD.slot)
UPDATE_ENTRY = tl.constexpr(UPDATE_WORD.entry)
UPDATE_BLOCK = tl.constexpr(UPDATE_WORD.block)
COUNTS_AT = tl.constexpr(USED_COUNTS.start)


@triton.jit
def _rows(
    message: tensor, blocks: tensor, lengths: tensor, adapters: tensor, starts: tensor,
    after: tensor, slots: tensor, row_adapters: tensor, counts: tensor, samples: tensor,
    uniforms: tensor, slot_count: tensor, width: tensor, cell_count: tensor,
    R: tl.constexpr, W: tl.constexpr, T: tl.constexpr, ROWS_AT: tl.constexpr,
    CELLS_AT: tl.constexpr, RP: tl.constexpr, CP: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the cells, and count every row's tokens; one program."""
    follow(EARLY)
    for start in range(0, cell_count, CP):
        cell = start + tl.arange(0, CP)
        there = cell < cell_count
        words = message + CELLS_AT + cell * UPDATE_SIZE
        group = tl.load(words + UPDATE_GROUP, mask=there, other=0).to(tl.int64)
        slot = tl.load(words + UPDATE_SLOT, mask=there, other=0)
        place = tl.load(words + UPDATE_ENTRY, mask=there, other=0)
        block = tl.load(words + UPDATE_BLOCK, mask=there, other=0)
        at = (group * slot_count + slot) * width + place
        tl.store(blocks + at, block, mask=there)
    row = tl.arange(0, RP)
    mine = row < R
    words = message + ROWS_AT + row * (ROW_UNIFORMS + W)
    slot = tl.load(words + ROW_SLOT, mask=mine, other=0).to(tl.int64)
    count = tl.load(words + ROW_COUNT, mask=mine, other=0)
    before = tl.load(lengths + slot, mask=mine, other=0)
    length = tl.where(count > 0, before + count, 0)
    ends = tl.cumsum(count, 0)
    first = ends - count
    # Every row's old length is read before any is set: rows of nobody share a slot.
    tl.debug_barrier()
    tl.store(lengths + slot, length, mask=mine)
    tl.store(starts + row, first, mask=mine)
    tl.store(starts + row + 1, ends, mask=row == R - 1)
    tl.store(after + row, length, mask=mine)
    tl.store(slots + row, slot, mask=mine)
    adapter = tl.load(adapters + slot, mask=mine, other=0)
    tl.store(row_adapters + row, adapter, mask=mine)
    for place in tl.static_range(0, W):
        sample = tl.maximum(ends + (place - W), first)
        sample = tl.minimum(tl.maximum(sample, 0), T - 1)
        tl.store(samples + row * W + place, sample, mask=mine)
        uniform = tl.load(words + ROW_UNIFORMS + place, mask=mine, other=0)
        tl.store(uniforms + row * W + place, uniform, mask=mine)
    index = tl.arange(0, 4)
    told = tl.load(message + COUNTS_AT + index, mask=index < 3, other=0)
    tl.store(counts + index, told, mask=index < 3)


@triton.jit
def _place(
    program: tensor, message: tensor, blocks: tensor, last: tensor, starts: tensor,
    after: tensor, slots: tensor, tokens: tensor, positions: tensor, rows: tensor,
    writes: tensor, slot_count: tensor, width: tensor, R: tl.constexpr, T: tl.constexpr,
    G: tl.constexpr, SIZE: tl.constexpr, TOKENS_AT: tl.constexpr, RP: tl.constexpr,
    TP: tl.constexpr,
) -> None:  # fmt: skip
    """Find the row of some tokens, and all that follows from it."""
    index = program * TP + tl.arange(0, TP)
    mine = index < T
    row = tl.zeros((TP,), tl.int32)
    for start in range(0, R, RP):
        other = start + tl.arange(0, RP)
        ends = tl.load(starts + 1 + other, mask=other < R, other=2147483647)
        row += tl.sum((index[:, None] >= ends[None, :]).to(tl.int32), 1)
    used = row < R
    row = tl.where(used, row, 0)
    begin = tl.load(starts + row, mask=mine, other=0)
    end = tl.load(starts + row + 1, mask=mine, other=0)
    length = tl.load(after + row, mask=mine, other=0)
    slot = tl.load(slots + row, mask=mine, other=0).to(tl.int64)
    position = tl.where(used, length - (end - begin) + index - begin, 0)
    given = tl.load(message + TOKENS_AT + index, mask=mine, other=0)
    previous = tl.load(last + slot, mask=mine, other=0)
    tl.store(tokens + index, tl.where(given < 0, previous, given), mask=mine)
    tl.store(positions + index, position, mask=mine)
    tl.store(rows + index, row, mask=mine)
    for group in tl.static_range(0, G):
        table = blocks + (group * slot_count + slot) * width
        home = tl.load(table + position // SIZE, mask=mine & used, other=0)
        cell = tl.where(used, home * SIZE + position % SIZE, 0)
        tl.store(writes + group * T + index, cell, mask=mine)


@triton.jit
def _copy(
    table: tensor, blocks: tensor, slots: tensor, row_blocks: tensor,
    slot_count: tensor, width: tensor, R: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the block table of one row in one group."""
    slot = tl.load(slots + table % R).to(tl.int64)
    source = blocks + ((table // R).to(tl.int64) * slot_count + slot) * width
    for start in range(0, width, BP):
        at = start + tl.arange(0, BP)
        block = tl.load(source + at, mask=at < width, other=0)
        cell = table.to(tl.int64) * width + at
        tl.store(row_blocks + cell, block, mask=at < width)


@triton.jit
def _tokens(
    message: tensor, blocks: tensor, last: tensor, starts: tensor, after: tensor,
    slots: tensor, tokens: tensor, positions: tensor, rows: tensor, row_blocks: tensor,
    writes: tensor, slot_count: tensor, width: tensor, R: tl.constexpr, T: tl.constexpr,
    G: tl.constexpr, SIZE: tl.constexpr, TOKENS_AT: tl.constexpr, RP: tl.constexpr,
    TP: tl.constexpr, BP: tl.constexpr, SPANS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Place a few tokens each, in the first programs; copy one table each, after them.

    Tables of the runner are read here and were written by the launch before.
    """
    follow(EARLY)
    program = tl.program_id(0)
    if program < SPANS:
        _place(
            program, message, blocks, last, starts, after, slots, tokens, positions,
            rows, writes, slot_count, width, R, T, G, SIZE, TOKENS_AT, RP, TP,
        )  # fmt: skip
    else:
        _copy(
            program - SPANS, blocks, slots, row_blocks, slot_count, width, R, BP
        )  # fmt: skip


def make_step(
    message: torch.Tensor, tables: Tables, *, bucket: Bucket, block_size: int,
    tuning: Tuning,
) -> tuple[Step, Tables]:  # fmt: skip
    groups, slot_count, width = tables.blocks.shape
    place = layout(bucket, groups=groups, block_size=block_size)
    count, rows, wide = bucket.tokens, bucket.rows, bucket.tokens_per_row
    step = _empty(message.device, groups, width, bucket)
    cells = place.max_updates
    _rows[(1,)](
        message, tables.blocks, tables.lengths, tables.adapters, step.starts,
        step.lengths, step.slots, step.adapters, step.used_counts, step.samples,
        step.uniforms, slot_count, width, cells, R=rows, W=wide, T=count,
        ROWS_AT=place.rows, CELLS_AT=place.updates, RP=max(power(rows), 16),
        CP=min(max(power(cells), 16), 1024), EARLY=tuning.starts_early(count),
        num_warps=4, **tuning.launch(count),
    )  # fmt: skip
    spans = -(-count // TOKENS)
    _tokens[(spans + groups * rows,)](
        message, tables.blocks, tables.last, step.starts, step.lengths, step.slots,
        step.tokens, step.positions, step.rows, step.blocks, step.writes, slot_count,
        width, R=rows, T=count, G=groups, SIZE=block_size, TOKENS_AT=place.tokens,
        RP=min(max(power(rows), 16), 64), TP=min(max(power(count), 16), TOKENS),
        BP=min(max(power(width), 16), 512), SPANS=spans,
        EARLY=tuning.starts_early(count), num_warps=4, **tuning.launch(count),
    )  # fmt: skip
    return step, tables


def _empty(place: torch.device, groups: int, width: int, bucket: Bucket) -> Step:
    """Arrays of a step. Those that torch indexes with are int64 already."""

    def long(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=place)

    def short(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=place)

    count, rows = bucket.tokens, bucket.rows
    samples = rows * bucket.tokens_per_row
    return Step(
        tokens=long(count),
        positions=long(count),
        rows=long(count),
        starts=long(rows + 1),
        lengths=long(rows),
        slots=long(rows),
        blocks=short(groups, rows, width),
        writes=long(groups, count),
        samples=long(samples),
        adapters=short(rows),
        used_counts=short(3),
        uniforms=short(samples),
    )


def _refuse(_message: Any, _tables: Any, *, bucket: Bucket, **_: Any) -> str | None:
    if bucket.rows > MOST_ROWS:
        return f"takes {MOST_ROWS} rows at most, found {bucket.rows}"
    return None


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """The kernel, cut as ``tuning`` says."""
    return (
        Kernel(
            "make_step",
            "triton",
            partial(make_step, tuning=tuning),
            refuse=_refuse,
            invariant=True,
            preference=PREFERENCE,
        ),
    )
