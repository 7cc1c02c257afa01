"""Decoding of a step message to the arrays of a step, and updates of the tables.

The tables are updated in place. Arrays used as indices are int64, so that layers need
not convert them.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from inl.ops.chunks import check_chunk
from inl.spec.kernel import Kernel
from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    DRAFT,
    MAX_TOKEN_BIASES,
    ROW_WORD,
    TOKEN_BIAS_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    USED_COUNTS,
    draft_words,
    layout,
    row_words,
    uniform_words,
)
from inl.spec.step import Bucket, Step, Tables


def make_step(
    message: torch.Tensor, tables: Tables, *, bucket: Bucket, block_size: int
) -> tuple[Step, Tables]:
    place = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    words = message.long()
    rows = words[place.rows : place.updates].view(bucket.rows, row_words(bucket))
    updates = words[place.updates : place.tokens].view(-1, UPDATE_WORDS)
    token_ids = words[place.tokens : place.size]
    slots, counts = rows[:, ROW_WORD.slot].contiguous(), rows[:, ROW_WORD.token_count]
    _update_block_tables(tables, updates)

    before = tables.lengths.index_select(0, slots).long()
    after = (before + counts).masked_fill_(counts == 0, 0)
    tables.lengths.index_copy_(0, slots, after.int())

    ends = counts.cumsum(0)
    starts = functional.pad(ends, (1, 0))
    index = torch.arange(bucket.tokens, device=message.device)
    unused = index >= ends[-1:]
    row = (index.unsqueeze(1) >= ends).sum(1).masked_fill_(unused, 0)
    offsets = (before - starts[:-1]).index_select(0, row)
    positions = (offsets + index).masked_fill_(unused, 0)
    row_blocks = tables.blocks.index_select(1, slots)
    block_ids = row_blocks[:, row, positions // block_size].long()
    writes = block_ids * block_size + positions % block_size
    last = tables.last.index_select(0, slots).index_select(0, row)
    tokens = torch.where(token_ids < 0, last, token_ids)
    if bucket.tokens_per_row > 1:
        drafts = rows[:, draft_words(bucket)]
        drafted = drafts[row, positions % drafts.shape[1]]
        tokens = torch.where(token_ids == DRAFT, drafted, tokens)
    samples = _samples(starts, bucket)
    sampled = positions.index_select(0, samples), row.index_select(0, samples)
    step = Step(
        tokens=tokens,
        positions=positions,
        rows=row,
        starts=starts,
        lengths=after,
        slots=slots,
        blocks=row_blocks,
        writes=writes.masked_fill_(unused, 0),
        samples=samples,
        adapters=tables.adapters.index_select(0, slots),
        used_counts=message[USED_COUNTS].clone(),
        uniforms=_uniforms(message[place.rows : place.updates], bucket, sampled),
    )
    return step, tables


def _update_block_tables(tables: Tables, updates: torch.Tensor) -> None:
    words, at = updates.unbind(1), UPDATE_WORD
    entries = words[at.group], words[at.slot], words[at.entry]
    tables.blocks.index_put_(entries, words[at.block].int())


def _samples(starts: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    if bucket.verifies:
        return torch.arange(bucket.tokens, device=starts.device)
    offsets = torch.arange(-bucket.tokens_per_row, 0, device=starts.device)
    samples = starts[1:].unsqueeze(1) + offsets
    samples = samples.maximum(starts[:-1].unsqueeze(1))
    return samples.clamp(0, bucket.tokens - 1).view(-1)


def _uniforms(
    rows: torch.Tensor, bucket: Bucket, sampled: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the uniform number of each sample; sampled: its position and row."""
    table = rows.view(bucket.rows, row_words(bucket))[:, uniform_words(bucket)]
    if bucket.tokens_per_row == 1:
        return table.clone().reshape(-1)
    positions, row = sampled
    return table[row, (positions + 1) % table.shape[1]]


def prune_last_layer(step: Step) -> Step:
    at, rows = step.samples, step.lengths.shape[0]
    used = step.used_counts[1:2]
    index = torch.arange(rows + 1, device=at.device)
    return step._replace(
        tokens=step.tokens.index_select(0, at),
        positions=step.positions.index_select(0, at),
        rows=step.rows.index_select(0, at),
        starts=index.minimum(used),
        writes=step.writes.index_select(1, at),
        samples=index[:-1],
        used_counts=used.repeat(3),
        plan=(),
    )


def chunk_rows(step: Step, *, chunk: int, block_size: int) -> Step:
    check_chunk(chunk, block_size)
    count, width = step.tokens.shape[0], step.blocks.shape[2]
    place, used, rows = step.positions.device, step.used_counts[2:], step.rows.long()
    index = torch.arange(count + 1, device=place)
    columns = torch.arange(min(width, chunk // block_size), device=place)
    first = step.positions // chunk * (chunk // block_size)
    entries = (first[:, None] + columns).clamp(max=width - 1)
    places = step.positions % chunk
    return step._replace(
        positions=places,
        rows=index[:-1],
        starts=index.minimum(used),
        lengths=(places + 1) * (index[:-1] < used),
        slots=step.slots[rows],
        blocks=step.blocks[:, rows[:, None], entries.long()],
        adapters=step.adapters[rows],
        used_counts=used.repeat(3),
        plan=(),
    )


def admit(messages: torch.Tensor, tables: Tables) -> Tables:
    groups, _slots, width = tables.blocks.shape
    at = ADMISSION_WORD
    params = messages[:, at.params : at.blocks].contiguous().view(torch.float32)
    slot = messages[:, at.slot].long()
    blocks = messages[:, at.blocks :].reshape(-1, groups, width).transpose(0, 1)
    tables.blocks.index_copy_(1, slot, blocks)
    tables.lengths.index_copy_(0, slot, messages[:, at.length])
    tables.last.index_copy_(0, slot, messages[:, at.last])
    tables.adapters.index_copy_(0, slot, messages[:, at.adapter])
    tables.params.index_copy_(0, slot, params)
    tables.token_counts.index_fill_(0, slot, 0)
    tables.bias.index_fill_(0, slot, 0.0)
    return tables


def set_token_bias(message: torch.Tensor, tables: Tables) -> Tables:
    slot = message[TOKEN_BIAS_WORD.slot].long()
    entries = message[TOKEN_BIAS_WORD.entries :].view(-1, BIAS_WORDS)
    places = slot.expand(MAX_TOKEN_BIASES), entries[:, BIAS_WORD.token].long()
    counts = entries[:, BIAS_WORD.token_count]
    tables.token_counts.index_put_(places, counts, accumulate=True)
    biases = entries[:, BIAS_WORD.bias].contiguous().view(torch.float32)
    tables.bias.index_put_(places, biases, accumulate=True)
    return tables


KERNELS = (
    Kernel("make_step", "eager", make_step, invariant=True),
    Kernel("prune_last_layer", "eager", prune_last_layer, invariant=True),
    Kernel("chunk_rows", "eager", chunk_rows, invariant=True),
    Kernel("admit", "eager", admit, invariant=True),
    Kernel("set_token_bias", "eager", set_token_bias, invariant=True),
)
