"""Decoding of a step message to the arrays of a step, in two launches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import tensor

from inl.spec.kernel import Kernel
from inl.spec.message import (
    DRAFT,
    ROW_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    USED_COUNTS,
    layout,
    row_words,
    uniform_words,
)
from inl.spec.step import Bucket, Step, Tables
from inl_torch.triton.common import PREFERENCE, power
from inl_torch.triton.pdl import pdl_sync
from inl_torch.triton.tuning import Tuning

MAX_ROWS = 4096
"""Most rows, whose token counts one program sums."""

TOKENS = 128
"""Tokens per program."""

ROW_SLOT = tl.constexpr(ROW_WORD.slot)
ROW_COUNT = tl.constexpr(ROW_WORD.token_count)
ROW_UNIFORMS = tl.constexpr(ROW_WORD.uniforms)
UPDATE_SIZE = tl.constexpr(UPDATE_WORDS)
UPDATE_GROUP = tl.constexpr(UPDATE_WORD.group)
UPDATE_SLOT = tl.constexpr(UPDATE_WORD.slot)
UPDATE_ENTRY = tl.constexpr(UPDATE_WORD.entry)
UPDATE_BLOCK = tl.constexpr(UPDATE_WORD.block)
COUNTS_AT = tl.constexpr(USED_COUNTS.start)
DRAFTED = tl.constexpr(DRAFT)


@triton.jit
def _make_rows(
    message: tensor, blocks: tensor, lengths: tensor, adapters: tensor, starts: tensor,
    after: tensor, slots: tensor, row_adapters: tensor, counts: tensor, samples: tensor,
    uniforms: tensor, slot_count: tensor, width: tensor, update_count: tensor,
    R: tl.constexpr, T: tl.constexpr, ROWS_AT: tl.constexpr, ROW_SIZE: tl.constexpr,
    VERIFIES: tl.constexpr, UPDATES_AT: tl.constexpr, RP: tl.constexpr,
    UPDATES_P: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Apply block table updates, and make the arrays of all rows; a single program."""
    pdl_sync(PDL)
    for start in range(0, update_count, UPDATES_P):
        update = start + tl.arange(0, UPDATES_P)
        valid = update < update_count
        words = message + UPDATES_AT + update * UPDATE_SIZE
        group = tl.load(words + UPDATE_GROUP, mask=valid, other=0).to(tl.int64)
        slot = tl.load(words + UPDATE_SLOT, mask=valid, other=0)
        entry = tl.load(words + UPDATE_ENTRY, mask=valid, other=0)
        block = tl.load(words + UPDATE_BLOCK, mask=valid, other=0)
        at = (group * slot_count + slot) * width + entry
        tl.store(blocks + at, block, mask=valid)
    row = tl.arange(0, RP)
    in_bounds = row < R
    words = message + ROWS_AT + row * ROW_SIZE
    slot = tl.load(words + ROW_SLOT, mask=in_bounds, other=0).to(tl.int64)
    count = tl.load(words + ROW_COUNT, mask=in_bounds, other=0)
    old_length = tl.load(lengths + slot, mask=in_bounds, other=0)
    length = tl.where(count > 0, old_length + count, 0)
    ends = tl.cumsum(count, 0)
    first = ends - count
    # All lengths are read before any is written, since padding rows share a slot.
    tl.debug_barrier()
    tl.store(lengths + slot, length, mask=in_bounds)
    tl.store(starts + row, first, mask=in_bounds)
    tl.store(starts + row + 1, ends, mask=row == R - 1)
    tl.store(after + row, length, mask=in_bounds)
    tl.store(slots + row, slot, mask=in_bounds)
    adapter = tl.load(adapters + slot, mask=in_bounds, other=0)
    tl.store(row_adapters + row, adapter, mask=in_bounds)
    if not VERIFIES:
        sample = tl.minimum(tl.maximum(tl.maximum(ends - 1, first), 0), T - 1)
        tl.store(samples + row, sample, mask=in_bounds)
        uniform = tl.load(words + ROW_UNIFORMS, mask=in_bounds, other=0)
        tl.store(uniforms + row, uniform, mask=in_bounds)
    index = tl.arange(0, 4)
    used = tl.load(message + COUNTS_AT + index, mask=index < 3, other=0)
    tl.store(counts + index, used, mask=index < 3)


@triton.jit
def _make_token_arrays(
    program: tensor, message: tensor, blocks: tensor, last: tensor, starts: tensor,
    after: tensor, slots: tensor, tokens: tensor, positions: tensor, rows: tensor,
    writes: tensor, samples: tensor, uniforms: tensor, slot_count: tensor,
    width: tensor, R: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr, TOKENS_AT: tl.constexpr, ROWS_AT: tl.constexpr,
    ROW_SIZE: tl.constexpr, VERIFIES: tl.constexpr, UNIFORMS: tl.constexpr,
    RP: tl.constexpr, TP: tl.constexpr,
) -> None:  # fmt: skip
    """Make the arrays of some tokens: row, position, cache slot."""
    index = program * TP + tl.arange(0, TP)
    in_bounds = index < T
    row = tl.zeros((TP,), tl.int32)
    for start in range(0, R, RP):
        other = start + tl.arange(0, RP)
        ends = tl.load(starts + 1 + other, mask=other < R, other=2147483647)
        row += tl.sum((index[:, None] >= ends[None, :]).to(tl.int32), 1)
    used = row < R
    row = tl.where(used, row, 0)
    begin = tl.load(starts + row, mask=in_bounds, other=0)
    end = tl.load(starts + row + 1, mask=in_bounds, other=0)
    length = tl.load(after + row, mask=in_bounds, other=0)
    slot = tl.load(slots + row, mask=in_bounds, other=0).to(tl.int64)
    position = tl.where(used, length - (end - begin) + index - begin, 0)
    token_id = tl.load(message + TOKENS_AT + index, mask=in_bounds, other=0)
    previous = tl.load(last + slot, mask=in_bounds, other=0)
    token = tl.where(token_id < 0, previous, token_id)
    if VERIFIES:
        words = message + ROWS_AT + row * ROW_SIZE + ROW_UNIFORMS
        draft = words + UNIFORMS + position % (UNIFORMS - 1)
        drafted = in_bounds & (token_id == DRAFTED)
        token = tl.where(drafted, tl.load(draft, mask=drafted, other=0), token)
        uniform = tl.load(words + (position + 1) % UNIFORMS, mask=in_bounds, other=0)
        tl.store(uniforms + index, uniform, mask=in_bounds)
        tl.store(samples + index, index, mask=in_bounds)
    tl.store(tokens + index, token, mask=in_bounds)
    tl.store(positions + index, position, mask=in_bounds)
    tl.store(rows + index, row, mask=in_bounds)
    for group in tl.static_range(0, G):
        table = blocks + (group * slot_count + slot) * width
        block_id = tl.load(table + position // SIZE, mask=in_bounds & used, other=0)
        update = tl.where(used, block_id * SIZE + position % SIZE, 0)
        tl.store(writes + group * T + index, update, mask=in_bounds)


@triton.jit
def _copy_block_table(
    table: tensor, blocks: tensor, slots: tensor, row_blocks: tensor,
    slot_count: tensor, width: tensor, R: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the block table of one row and cache group."""
    slot = tl.load(slots + table % R).to(tl.int64)
    source = blocks + ((table // R).to(tl.int64) * slot_count + slot) * width
    for start in range(0, width, BP):
        at = start + tl.arange(0, BP)
        block = tl.load(source + at, mask=at < width, other=0)
        update = table.to(tl.int64) * width + at
        tl.store(row_blocks + update, block, mask=at < width)


@triton.jit
def _make_tokens(
    message: tensor, blocks: tensor, last: tensor, starts: tensor, after: tensor,
    slots: tensor, tokens: tensor, positions: tensor, rows: tensor, row_blocks: tensor,
    writes: tensor, samples: tensor, uniforms: tensor, slot_count: tensor,
    width: tensor, R: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
    SIZE: tl.constexpr, TOKENS_AT: tl.constexpr, ROWS_AT: tl.constexpr,
    ROW_SIZE: tl.constexpr, VERIFIES: tl.constexpr, UNIFORMS: tl.constexpr,
    RP: tl.constexpr, TP: tl.constexpr, BP: tl.constexpr, SPANS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Make the arrays of some tokens, or, in later programs, copy one block table.

    Reads tables that the previous launch has written.
    """
    pdl_sync(PDL)
    program = tl.program_id(0)
    if program < SPANS:
        _make_token_arrays(
            program, message, blocks, last, starts, after, slots, tokens, positions,
            rows, writes, samples, uniforms, slot_count, width, R, T, G, SIZE,
            TOKENS_AT, ROWS_AT, ROW_SIZE, VERIFIES, UNIFORMS, RP, TP,
        )  # fmt: skip
    else:
        _copy_block_table(
            program - SPANS, blocks, slots, row_blocks, slot_count, width, R, BP
        )  # fmt: skip


def make_step(
    message: torch.Tensor, tables: Tables, *, bucket: Bucket, block_size: int,
    tuning: Tuning,
) -> tuple[Step, Tables]:  # fmt: skip
    groups, slot_count, width = tables.blocks.shape
    place = layout(bucket, groups=groups, block_size=block_size)
    count, rows = bucket.tokens, bucket.rows
    step = _allocate_step(message.device, groups, width, bucket)
    updates, numbers = place.max_updates, uniform_words(bucket)
    words = {
        "ROWS_AT": place.rows, "ROW_SIZE": row_words(bucket),
        "VERIFIES": bucket.verifies,
    }  # fmt: skip
    _make_rows[(1,)](
        message, tables.blocks, tables.lengths, tables.adapters, step.starts,
        step.lengths, step.slots, step.adapters, step.used_counts, step.samples,
        step.uniforms, slot_count, width, updates, R=rows, T=count,
        UPDATES_AT=place.updates, RP=max(power(rows), 16),
        UPDATES_P=min(max(power(updates), 16), 1024), PDL=tuning.uses_pdl(count),
        num_warps=4, **words, **tuning.launch(count),
    )  # fmt: skip
    spans = -(-count // TOKENS)
    _make_tokens[(spans + groups * rows,)](
        message, tables.blocks, tables.last, step.starts, step.lengths, step.slots,
        step.tokens, step.positions, step.rows, step.blocks, step.writes, step.samples,
        step.uniforms, slot_count, width, R=rows, T=count, G=groups,
        SIZE=block_size, TOKENS_AT=place.tokens, RP=min(max(power(rows), 16), 64),
        TP=min(max(power(count), 16), TOKENS), BP=min(max(power(width), 16), 512),
        SPANS=spans,
        UNIFORMS=numbers.stop - numbers.start, PDL=tuning.uses_pdl(count), num_warps=4,
        **words, **tuning.launch(count),
    )  # fmt: skip
    return step, tables


def _allocate_step(
    place: torch.device, groups: int, width: int, bucket: Bucket
) -> Step:
    """Allocate the arrays of a step; those used as indices are int64."""

    def long(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=place)

    def short(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=place)

    count, rows = bucket.tokens, bucket.rows
    return Step(
        tokens=long(count),
        positions=long(count),
        rows=long(count),
        starts=long(rows + 1),
        lengths=long(rows),
        slots=long(rows),
        blocks=short(groups, rows, width),
        writes=long(groups, count),
        samples=long(bucket.samples),
        adapters=short(rows),
        used_counts=short(3),
        uniforms=short(bucket.samples),
    )


def _refuse(_message: Any, _tables: Any, *, bucket: Bucket, **_: Any) -> str | None:
    if bucket.rows > MAX_ROWS:
        return f"takes {MAX_ROWS} rows at most, found {bucket.rows}"
    if bucket.tokens_per_row > 1 and not bucket.verifies:
        return f"takes 1 sample per row or every token, found {bucket.tokens_per_row}"
    return None


def kernels(tuning: Tuning) -> tuple[Kernel, ...]:
    """Return the kernel."""
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
