"""Step frames, admissions and token biases: integers only."""

from __future__ import annotations

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
from inl.spec.step import Bucket, Step, Tables
from inl_onnx import functions as fn
from inl_onnx.graph import Value
from inl_onnx.kernels.kernel import kernel


def make_step(
    message: Value, tables: Tables, *, bucket: Bucket, block_size: int
) -> tuple[Step, Tables]:
    place = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    rows = message[place.rows : place.updates].reshape(bucket.rows, row_words(bucket))
    updates = message[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
    given = message[place.tokens : place.size]
    slots, counts = rows[:, ROW_WORD.slot], rows[:, ROW_WORD.token_count]
    at = UPDATE_WORD
    entries = updates[:, at.group], updates[:, at.slot], updates[:, at.entry]
    blocks = fn.put(tables.blocks, entries, updates[:, at.block])
    before = fn.take(tables.lengths, slots)
    after = fn.where(counts > 0, before + counts, 0)
    ends = fn.cumsum(counts)
    starts = fn.concatenate([fn.full(ends, (1,), 0, "int32"), ends], 0)
    index = fn.arange(message, bucket.tokens)
    used = index < ends[-1]
    owner = fn.sum_of((index[:, None] >= ends).astype("int32"))
    row = fn.where(used, owner, 0)
    positions = fn.where(used, fn.take(before - starts[:-1], row) + index, 0)
    row_blocks = fn.take(blocks, slots, 1)
    token_blocks = fn.pick(row_blocks, row, positions // block_size)
    writes = token_blocks * block_size + positions % block_size
    samples = index if bucket.verifies else last_tokens(starts, bucket)
    tokens = fn.where(given < 0, fn.take(fn.take(tables.last, slots), row), given)
    uniforms = rows[:, uniform_words(bucket)]
    if bucket.tokens_per_row > 1:
        drafts = rows[:, draft_words(bucket)]
        drafted = fn.pick(drafts, row, positions % drafts.shape[1])
        tokens = fn.where(given.equal(DRAFT), drafted, tokens)
        places = (fn.take(positions, samples) + 1) % uniforms.shape[1]
        uniforms = fn.pick(uniforms, fn.take(row, samples), places)
    step = Step(
        tokens=tokens,
        positions=positions,
        rows=row,
        starts=starts,
        lengths=after,
        slots=slots,
        blocks=row_blocks,
        writes=fn.where(used, writes, 0),
        samples=samples,
        adapters=fn.take(tables.adapters, slots),
        used_counts=message[USED_COUNTS],
        uniforms=uniforms.reshape(-1),
    )
    lengths = fn.put(tables.lengths, [slots], after)
    return step, tables._replace(blocks=blocks, lengths=lengths)


def last_tokens(starts: Value, bucket: Bucket) -> Value:
    """Return the last ``tokens_per_row`` tokens of each row: [S]."""
    offsets = fn.arange(starts, 0, -bucket.tokens_per_row)
    samples = fn.maximum(starts[1:, None] + offsets, starts[:-1, None])
    return fn.clip(samples, 0, bucket.tokens - 1).reshape(-1)


def prune_last_layer(step: Step) -> Step:
    at, rows, used = step.samples, step.lengths.shape[0], step.used_counts[1]
    return step._replace(
        tokens=fn.take(step.tokens, at),
        positions=fn.take(step.positions, at),
        rows=fn.take(step.rows, at),
        starts=fn.minimum(fn.arange(used, rows + 1), used),
        writes=fn.take(step.writes, at, 1),
        samples=fn.arange(used, rows),
        used_counts=fn.broadcast_to(used, (3,)),
        plan=(),
    )


def chunk_rows(step: Step, *, chunk: int, block_size: int) -> Step:
    check_chunk(chunk, block_size)
    groups, _, width = step.blocks.shape
    count, columns = step.tokens.shape[0], min(width, chunk // block_size)
    index, used = fn.arange(step.used_counts, count + 1), step.used_counts[2]
    first = step.positions // chunk * (chunk // block_size)
    steps = fn.arange(step.used_counts, columns)
    entries = fn.minimum(first[:, None] + steps, width - 1)
    rows = fn.broadcast_to(step.rows[:, None], (count, columns))
    blocks = fn.pick(step.blocks, rows.reshape(-1), entries.reshape(-1))
    places = step.positions % chunk
    return step._replace(
        positions=places,
        rows=index[:-1],
        starts=fn.minimum(index, used),
        lengths=fn.where(index[:-1] < used, places + 1, 0),
        slots=fn.take(step.slots, step.rows),
        blocks=blocks.reshape(groups, count, columns),
        adapters=fn.take(step.adapters, step.rows),
        used_counts=fn.broadcast_to(used, (3,)),
        plan=(),
    )


def admit(messages: Value, tables: Tables) -> Tables:
    at = ADMISSION_WORD
    slot = messages[:, at.slot]
    groups, _, width = tables.blocks.shape
    blocks = messages[:, at.blocks :].reshape(-1, groups, width)
    group = fn.arange(slot, groups)[:, None]
    return tables._replace(
        blocks=fn.put(tables.blocks, [group, slot], fn.transpose(blocks, 1, 0, 2)),
        lengths=fn.put(tables.lengths, [slot], messages[:, at.length]),
        last=fn.put(tables.last, [slot], messages[:, at.last]),
        adapters=fn.put(tables.adapters, [slot], messages[:, at.adapter]),
        params=fn.put(
            tables.params, [slot], fn.floats(messages[:, at.params : at.blocks])
        ),
        token_counts=cleared(tables.token_counts, slot),
        bias=cleared(tables.bias, slot),
    )


def cleared(table: Value, slot: Value) -> Value:
    """Set rows of a table to zero."""
    return fn.put(table, [slot], fn.full(slot, (1, 1), 0, table.dtype))


def set_token_bias(message: Value, tables: Tables) -> Tables:
    at = TOKEN_BIAS_WORD.slot
    slot = message[at : at + 1]
    entries = message[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
    tokens, vocab = entries[:, BIAS_WORD.token], tables.bias.shape[1]
    counts = entries[:, BIAS_WORD.token_count].astype("float32")
    amounts = [counts, fn.floats(entries[:, BIAS_WORD.bias])]
    counted, biased = (fn.totals(tokens, x, vocab)[None] for x in amounts)
    counted = counted.astype("int32")
    return tables._replace(
        token_counts=fn.put(
            tables.token_counts, [slot], fn.take(tables.token_counts, slot) + counted
        ),
        bias=fn.put(tables.bias, [slot], fn.take(tables.bias, slot) + biased),
    )


KERNELS = (
    kernel(make_step),
    kernel(prune_last_layer),
    kernel(chunk_rows),
    kernel(admit),
    kernel(set_token_bias),
)
