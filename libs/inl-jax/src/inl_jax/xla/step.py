"""Step frames, admissions and token biases: integers only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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
from inl_jax.tensors import Array
from inl_jax.xla.kernel import kernel


def make_step(
    message: Array, tables: Tables, *, bucket: Bucket, block_size: int
) -> tuple[Step, Tables]:
    place = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    rows = message[place.rows : place.updates].reshape(bucket.rows, row_words(bucket))
    updates = message[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
    given = message[place.tokens : place.size]
    slots, counts = rows[:, ROW_WORD.slot], rows[:, ROW_WORD.token_count]
    at = UPDATE_WORD
    entries = updates[:, at.group], updates[:, at.slot], updates[:, at.entry]
    blocks = tables.blocks.at[entries].set(updates[:, at.block])
    before = tables.lengths[slots]
    after = jnp.where(counts > 0, before + counts, 0)
    ends = jnp.cumsum(counts)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(bucket.tokens, dtype=jnp.int32)
    used = index < ends[-1]
    row = jnp.where(used, (index[:, None] >= ends).sum(1, dtype=jnp.int32), 0)
    positions = jnp.where(used, before[row] + index - starts[row], 0)
    row_blocks = blocks[:, slots]
    token_blocks = row_blocks[:, row, positions // block_size]
    writes = token_blocks * block_size + positions % block_size
    offsets = jnp.arange(bucket.tokens_per_row, dtype=jnp.int32) - bucket.tokens_per_row
    samples = jnp.maximum(ends[:, None] + offsets, starts[:-1, None])
    samples = jnp.clip(samples, 0, bucket.tokens - 1).reshape(-1)
    if bucket.verifies:
        samples = index
    tokens = jnp.where(given < 0, tables.last[slots][row], given)
    uniforms = rows[:, uniform_words(bucket)]
    if bucket.tokens_per_row > 1:
        drafts = rows[:, draft_words(bucket)]
        drafted = drafts[row, positions % drafts.shape[1]]
        tokens = jnp.where(given == DRAFT, drafted, tokens)
        places = (positions[samples] + 1) % uniforms.shape[1]
        uniforms = uniforms[row[samples], places]
    step = Step(
        tokens=tokens,
        positions=positions,
        rows=row,
        starts=starts,
        lengths=after,
        slots=slots,
        blocks=row_blocks,
        writes=jnp.where(used, writes, 0),
        samples=samples,
        adapters=tables.adapters[slots],
        used_counts=message[USED_COUNTS],
        uniforms=uniforms.reshape(-1),
    )
    lengths = tables.lengths.at[slots].set(after)
    return step, tables._replace(blocks=blocks, lengths=lengths)


def prune_last_layer(step: Step) -> Step:
    at, rows, used = step.samples, step.lengths.shape[0], step.used_counts[1]
    return step._replace(
        tokens=step.tokens[at],
        positions=step.positions[at],
        rows=step.rows[at],
        starts=jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32), used),
        writes=step.writes[:, at],
        samples=jnp.arange(rows, dtype=jnp.int32),
        used_counts=jnp.full(3, used),
        plan=(),
    )


def chunk_rows(step: Step, *, chunk: int, block_size: int) -> Step:
    check_chunk(chunk, block_size)
    count, width = step.tokens.shape[0], step.blocks.shape[2]
    index, used = jnp.arange(count + 1, dtype=jnp.int32), step.used_counts[2]
    columns = jnp.arange(min(width, chunk // block_size), dtype=jnp.int32)
    first = step.positions // chunk * (chunk // block_size)
    entries = jnp.minimum(first[:, None] + columns, width - 1)
    places = step.positions % chunk
    return step._replace(
        positions=places,
        rows=index[:-1],
        starts=jnp.minimum(index, used),
        lengths=jnp.where(index[:-1] < used, places + 1, 0),
        slots=step.slots[step.rows],
        blocks=step.blocks[:, step.rows[:, None], entries],
        adapters=step.adapters[step.rows],
        used_counts=jnp.full(3, used),
        plan=(),
    )


def admit(messages: Array, tables: Tables) -> Tables:
    at = ADMISSION_WORD
    slot = messages[:, at.slot]
    params = floats(messages[:, at.params : at.blocks])
    groups, _, width = tables.blocks.shape
    blocks = messages[:, at.blocks :].reshape(-1, groups, width).swapaxes(0, 1)
    return tables._replace(
        blocks=tables.blocks.at[:, slot].set(blocks),
        lengths=tables.lengths.at[slot].set(messages[:, at.length]),
        last=tables.last.at[slot].set(messages[:, at.last]),
        adapters=tables.adapters.at[slot].set(messages[:, at.adapter]),
        params=tables.params.at[slot].set(params),
        token_counts=tables.token_counts.at[slot].set(0),
        bias=tables.bias.at[slot].set(0),
    )


def set_token_bias(message: Array, tables: Tables) -> Tables:
    slot = message[TOKEN_BIAS_WORD.slot]
    entries = message[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
    ids, counts = entries[:, BIAS_WORD.token], entries[:, BIAS_WORD.token_count]
    return tables._replace(
        token_counts=tables.token_counts.at[slot, ids].add(counts),
        bias=tables.bias.at[slot, ids].add(floats(entries[:, BIAS_WORD.bias])),
    )


def floats(bits: Array) -> Any:
    """Return int32 bits as float32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


KERNELS = (
    kernel(make_step),
    kernel(prune_last_layer),
    kernel(chunk_rows),
    kernel(admit),
    kernel(set_token_bias),
)
