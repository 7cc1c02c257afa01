"""Step frames, admissions and token biases: integers only."""

from __future__ import annotations

from typing import Any

from inl.ops.chunks import check_chunk
from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    DRAFT,
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
from inl.spec.step import Array, Bucket, Step, Tables


def make_step(
    xp: Any, message: Array, tables: Tables, *, bucket: Bucket, block_size: int
) -> tuple[Step, Tables]:
    place = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    rows = message[place.rows : place.updates].reshape(bucket.rows, row_words(bucket))
    updates = message[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
    given = message[place.tokens : place.size]
    slots, counts = rows[:, ROW_WORD.slot], rows[:, ROW_WORD.token_count]
    at = UPDATE_WORD
    entries = updates[:, at.group], updates[:, at.slot], updates[:, at.entry]
    blocks = xp.put(tables.blocks, entries, updates[:, at.block])
    before = xp.take(tables.lengths, slots)
    after = xp.where(counts > 0, before + counts, 0)
    ends = xp.cumsum(counts)
    starts = xp.concatenate([xp.full(ends, (1,), 0, "int32"), ends], 0)
    index = xp.arange(message, bucket.tokens)
    used = index < ends[-1]
    owner = xp.sum_of((index[:, None] >= ends).astype("int32"))
    row = xp.where(used, owner, 0)
    positions = xp.where(used, xp.take(before - starts[:-1], row) + index, 0)
    row_blocks = xp.take(blocks, slots, 1)
    token_blocks = xp.pick(row_blocks, row, positions // block_size)
    writes = token_blocks * block_size + positions % block_size
    samples = index if bucket.verifies else last_tokens(xp, starts, bucket)
    tokens = xp.where(given < 0, xp.take(xp.take(tables.last, slots), row), given)
    uniforms = rows[:, uniform_words(bucket)]
    if bucket.tokens_per_row > 1:
        drafts = rows[:, draft_words(bucket)]
        drafted = xp.pick(drafts, row, positions % drafts.shape[1])
        tokens = xp.where(xp.equal(given, DRAFT), drafted, tokens)
        places = (xp.take(positions, samples) + 1) % uniforms.shape[1]
        uniforms = xp.pick(uniforms, xp.take(row, samples), places)
    step = Step(
        tokens=tokens,
        positions=positions,
        rows=row,
        starts=starts,
        lengths=after,
        slots=slots,
        blocks=row_blocks,
        writes=xp.where(used, writes, 0),
        samples=samples,
        adapters=xp.take(tables.adapters, slots),
        used_counts=message[USED_COUNTS],
        uniforms=uniforms.reshape(-1),
    )
    lengths = xp.put(tables.lengths, [slots], after)
    return step, tables._replace(blocks=blocks, lengths=lengths)


def last_tokens(xp: Any, starts: Array, bucket: Bucket) -> Array:
    """Return the last ``tokens_per_row`` tokens of each row: [S]."""
    offsets = xp.arange(starts, 0, -bucket.tokens_per_row)
    samples = xp.maximum(starts[1:, None] + offsets, starts[:-1, None])
    return xp.clip(samples, 0, bucket.tokens - 1).reshape(-1)


def prune_last_layer(xp: Any, step: Step) -> Step:
    at, rows, used = step.samples, step.lengths.shape[0], step.used_counts[1]
    return step._replace(
        tokens=xp.take(step.tokens, at),
        positions=xp.take(step.positions, at),
        rows=xp.take(step.rows, at),
        starts=xp.minimum(xp.arange(used, rows + 1), used),
        writes=xp.take(step.writes, at, 1),
        samples=xp.arange(used, rows),
        used_counts=xp.broadcast_to(used, (3,)),
        plan=(),
    )


def chunk_rows(xp: Any, step: Step, *, chunk: int, block_size: int) -> Step:
    check_chunk(chunk, block_size)
    groups, _, width = step.blocks.shape
    count, columns = step.tokens.shape[0], min(width, chunk // block_size)
    index, used = xp.arange(step.used_counts, count + 1), step.used_counts[2]
    first = step.positions // chunk * (chunk // block_size)
    steps = xp.arange(step.used_counts, columns)
    entries = xp.minimum(first[:, None] + steps, width - 1)
    rows = xp.broadcast_to(step.rows[:, None], (count, columns))
    blocks = xp.pick(step.blocks, rows.reshape(-1), entries.reshape(-1))
    places = step.positions % chunk
    return step._replace(
        positions=places,
        rows=index[:-1],
        starts=xp.minimum(index, used),
        lengths=xp.where(index[:-1] < used, places + 1, 0),
        slots=xp.take(step.slots, step.rows),
        blocks=blocks.reshape(groups, count, columns),
        adapters=xp.take(step.adapters, step.rows),
        used_counts=xp.broadcast_to(used, (3,)),
        plan=(),
    )


def admit(xp: Any, messages: Array, tables: Tables) -> Tables:
    at = ADMISSION_WORD
    slot = messages[:, at.slot]
    groups, _, width = tables.blocks.shape
    blocks = messages[:, at.blocks :].reshape(-1, groups, width)
    return tables._replace(
        blocks=xp.put_columns(tables.blocks, slot, xp.transpose(blocks, 1, 0, 2)),
        lengths=xp.put(tables.lengths, [slot], messages[:, at.length]),
        last=xp.put(tables.last, [slot], messages[:, at.last]),
        adapters=xp.put(tables.adapters, [slot], messages[:, at.adapter]),
        params=xp.put(
            tables.params, [slot], xp.floats(messages[:, at.params : at.blocks])
        ),
        token_counts=cleared(xp, tables.token_counts, slot),
        bias=cleared(xp, tables.bias, slot),
    )


def cleared(xp: Any, table: Array, slot: Array) -> Array:
    """Set rows of a table to zero."""
    return xp.put(table, [slot], xp.full(slot, (1, 1), 0, table.dtype))


def set_token_bias(xp: Any, message: Array, tables: Tables) -> Tables:
    at = TOKEN_BIAS_WORD.slot
    slot = message[at : at + 1]
    entries = message[TOKEN_BIAS_WORD.entries :].reshape(1, -1, BIAS_WORDS)
    ids, counts = entries[..., BIAS_WORD.token], entries[..., BIAS_WORD.token_count]
    biases = xp.floats(entries[..., BIAS_WORD.bias])
    return tables._replace(
        token_counts=xp.counted(tables.token_counts, slot, ids, counts),
        bias=xp.counted(tables.bias, slot, ids, biases),
    )
