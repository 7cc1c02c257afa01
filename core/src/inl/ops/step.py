"""Ops between steps: build step arrays from a message, update slot tables.

Integers only. The bodies have fixed shapes and no data-dependent branches, so that
backends can translate them directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from inl.ops.step_cases import admit_cases, step_cases, token_bias_cases
from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    DRAFT,
    FEEDBACK,
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
from inl.spec.op import Spec, nbytes, op
from inl.spec.step import PARAMS, Array, Bucket, Step, Tables


def _step_shapes(_message: Spec, tables: Any, *, bucket: Bucket, **_: Any) -> Any:
    groups, _slots, width = tables.blocks.shape
    tokens, rows, samples = bucket.tokens, bucket.rows, bucket.samples
    by_token, by_row = Spec((tokens,), "int32"), Spec((rows,), "int32")
    by_sample = Spec((samples,), "int32")
    step = Step(
        tokens=by_token,
        positions=by_token,
        rows=by_token,
        starts=Spec((rows + 1,), "int32"),
        lengths=by_row,
        slots=by_row,
        blocks=Spec((groups, rows, width), "int32"),
        writes=Spec((groups, tokens), "int32"),
        samples=by_sample,
        adapters=by_row,
        used_counts=Spec((3,), "int32"),
        uniforms=by_sample,
    )
    return step, tables


def empty_tables(
    *,
    groups: int,
    slots: int,
    max_blocks_per_seq: int,
    vocab: int = 0,
    zeros: Callable[[tuple[int, ...], str], Any] = np.zeros,
) -> Tables:
    """Allocate tables in which every slot is free.

    vocab: columns of counts and biases; 0 if no "sample_filtered" program is available.
    zeros: (shape, dtype name) -> zeroed array.
    """
    return Tables(
        blocks=zeros((groups, slots, max_blocks_per_seq), "int32"),
        lengths=zeros((slots,), "int32"),
        last=zeros((slots,), "int32"),
        adapters=zeros((slots,), "int32"),
        params=zeros((slots, len(PARAMS)), "float32"),
        token_counts=zeros((slots, vocab), "int32"),
        bias=zeros((slots, vocab), "float32"),
    )


def _step_traffic(
    results: Any, message: Any, _tables: Any, *, bucket: Bucket, **_: Any
) -> int:
    """The message, the tables' entries of each row, and the step's arrays."""
    step, _ = results
    entries = nbytes(step.blocks) + 3 * 4 * bucket.rows
    return nbytes((message, step)) + entries


@op(
    shapes=_step_shapes,
    cases=step_cases,
    consumes=("tables",),
    rounds=False,
    traffic=_step_traffic,
)
def make_step(
    message: Array, tables: Tables, *, bucket: Bucket, block_size: int
) -> tuple[Step, Tables]:
    """Build the arrays of a step from its message and the slot tables.

    message: int32 [words] in the layout of :func:`inl.spec.message.layout`. Returns the
    step, and the tables with the message's block-table updates and new lengths.
    """
    offset = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    rows = message[offset.rows : offset.updates].reshape(bucket.rows, row_words(bucket))
    updates = message[offset.updates : offset.tokens].reshape(-1, UPDATE_WORDS)
    given = message[offset.tokens : offset.size]
    slots, counts = rows[:, ROW_WORD.slot], rows[:, ROW_WORD.token_count]

    blocks = tables.blocks.copy()
    at = UPDATE_WORD
    entries = updates[:, at.group], updates[:, at.slot], updates[:, at.entry]
    blocks[entries] = updates[:, at.block]
    before = tables.lengths[slots]
    after = np.where(counts > 0, before + counts, 0).astype(np.int32)
    lengths = tables.lengths.copy()
    lengths[slots] = after

    ends = np.cumsum(counts).astype(np.int32)
    starts = np.concatenate([np.zeros(1, np.int32), ends])
    index = np.arange(bucket.tokens, dtype=np.int32)
    used = index < ends[-1]
    owner = (index[:, None] >= ends[None, :]).sum(1)
    row = np.where(used, owner, 0).astype(np.int32)
    positions = np.where(used, before[row] + index - starts[row], 0).astype(np.int32)
    row_blocks = blocks[:, slots]
    token_blocks = row_blocks[:, row, positions // block_size]
    writes = np.where(used, token_blocks * block_size + positions % block_size, 0)

    samples = _samples(starts, bucket)
    ids = np.where(given == FEEDBACK[0], tables.last[slots][row], given)
    uniforms = rows[:, uniform_words(bucket)]
    if bucket.tokens_per_row > 1:
        drafts = rows[:, draft_words(bucket)]
        ids = np.where(given == DRAFT, drafts[row, positions % drafts.shape[1]], ids)
        at = (positions[samples] + 1) % uniforms.shape[1]
        uniforms = uniforms[row[samples], at]
    step = Step(
        tokens=ids,
        positions=positions,
        rows=row,
        starts=starts,
        lengths=after,
        slots=slots.copy(),
        blocks=row_blocks,
        writes=writes.astype(np.int32),
        samples=samples,
        adapters=tables.adapters[slots],
        used_counts=message[USED_COUNTS].copy(),
        uniforms=uniforms.reshape(-1).copy(),
    )
    return step, tables._replace(blocks=blocks, lengths=lengths)


def _samples(starts: Array, bucket: Bucket) -> Array:
    """Every token if drafts are verified, else the last W tokens of each row."""
    if bucket.verifies:
        return np.arange(bucket.tokens, dtype=np.int32)
    offsets = np.arange(-bucket.tokens_per_row, 0, dtype=np.int32)
    samples = np.maximum(starts[1:, None] + offsets, starts[:-1, None])
    return np.clip(samples, 0, bucket.tokens - 1).reshape(-1).astype(np.int32)


def _admit_traffic(tables: Any, messages: Any, _tables: Any) -> int:
    """Messages read, one entry of each table written per message."""
    entry = nbytes(tables) // tables.lengths.shape[0]
    return int(nbytes(messages) + messages.shape[0] * entry)


@op(
    shapes=lambda _messages, tables: tables,
    cases=admit_cases,
    consumes=("tables",),
    rounds=False,
    traffic=_admit_traffic,
)
def admit(messages: Array, tables: Tables) -> Tables:
    """Set slots from admission frames, or clear them from release frames.

    messages: int32 [n, words], one frame per row, each for a different slot. Rows of
    zeros are padding and write to slot 0. The slots' token counts and biases become 0;
    :data:`set_token_bias` sets them.
    """
    groups, _slots, width = tables.blocks.shape
    at = ADMISSION_WORD
    updated = Tables(*(array.copy() for array in tables))
    for message in messages:
        slot = message[at.slot]
        params = np.ascontiguousarray(message[at.params : at.blocks]).view(np.float32)
        updated.blocks[:, slot] = message[at.blocks :].reshape(groups, width)
        updated.lengths[slot] = message[at.length]
        updated.last[slot] = message[at.last]
        updated.adapters[slot] = message[at.adapter]
        updated.params[slot] = params
        updated.token_counts[slot] = 0
        updated.bias[slot] = 0
    return updated


@op(
    shapes=lambda _message, tables: tables,
    cases=token_bias_cases,
    consumes=("tables",),
    rounds=False,
    traffic=lambda _tables, message, _old: 3 * nbytes(message),
)
def set_token_bias(message: Array, tables: Tables) -> Tables:
    """Add the token counts and biases of a frame to its slot.

    message: int32 words of a token-bias frame, see :mod:`inl.spec.message`.
    """
    slot = message[TOKEN_BIAS_WORD.slot]
    entries = message[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
    tokens = entries[:, BIAS_WORD.token]
    counts, bias = tables.token_counts.copy(), tables.bias.copy()
    np.add.at(counts[slot], tokens, entries[:, BIAS_WORD.token_count])
    biases = np.ascontiguousarray(entries[:, BIAS_WORD.bias]).view(np.float32)
    np.add.at(bias[slot], tokens, biases)
    return tables._replace(token_counts=counts, bias=bias)
