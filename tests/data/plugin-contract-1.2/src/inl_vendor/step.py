"""Kernels of steps as a vendor of contract 1.2 wrote them: values by position."""

import numpy as np

from inl.spec.kernel import Kernel
from inl.spec.message import (
    ADMISSION_WORD,
    DRAFT,
    FEEDBACK,
    HEADER,
    ROW_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    USED_COUNTS,
    draft_words,
    layout,
    row_words,
    uniform_words,
)
from inl.spec.step import NO_TOKEN, PARAMS, Step, Tables


def make_step(message, tables, *, bucket, block_size):
    place = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    rows = message[HEADER : place.updates].reshape(bucket.rows, row_words(bucket))
    updates = message[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
    given = message[place.tokens : place.size]
    slots, counts = rows[:, ROW_WORD.slot], rows[:, ROW_WORD.token_count]
    blocks, at = tables.blocks.copy(), UPDATE_WORD
    where = updates[:, at.group], updates[:, at.slot], updates[:, at.entry]
    blocks[where] = updates[:, at.block]
    before = tables.lengths[slots]
    after = np.where(counts > 0, before + counts, 0).astype(np.int32)
    lengths = tables.lengths.copy()
    lengths[slots] = after
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    index = np.arange(bucket.tokens, dtype=np.int32)
    used = index < starts[-1]
    owner = np.searchsorted(starts[1:], index, side="right")
    row = np.where(used, owner, 0).astype(np.int32)
    positions = np.where(used, before[row] + index - starts[row], 0).astype(np.int32)
    row_blocks = blocks[:, slots]
    cells = row_blocks[:, row, positions // block_size] * block_size
    writes = np.where(used, cells + positions % block_size, 0).astype(np.int32)
    if bucket.verifies:
        samples = index
    else:
        offsets = np.arange(-bucket.tokens_per_row, 0, dtype=np.int32)
        samples = np.maximum(starts[1:, None] + offsets, starts[:-1, None])
        samples = np.clip(samples, 0, bucket.tokens - 1).reshape(-1).astype(np.int32)
    ids = np.where(given == FEEDBACK[0], tables.last[slots][row], given)
    uniforms = rows[:, uniform_words(bucket)]
    if bucket.tokens_per_row > 1:
        drafts = rows[:, draft_words(bucket)]
        ids = np.where(given == DRAFT, drafts[row, positions % drafts.shape[1]], ids)
        number = (positions[samples] + 1) % (2 * bucket.tokens_per_row - 1)
        uniforms = uniforms[row[samples], number]
    adapters, used_counts = tables.adapters[slots], message[USED_COUNTS].copy()
    step = Step(
        ids, positions, row, starts, after, slots.copy(), row_blocks, writes, samples,
        adapters, used_counts, uniforms.reshape(-1).copy(),
    )  # fmt: skip
    last, adapters, params = tables.last, tables.adapters, tables.params
    counts, bias = tables.token_counts, tables.bias
    return step, Tables(blocks, lengths, last, adapters, params, counts, bias)


def admit(messages, tables):
    blocks, lengths, last, adapters, params, counts, bias = map(np.copy, tables)
    at, groups = ADMISSION_WORD, blocks.shape[0]
    for message in messages:
        slot = message[at.slot]
        lengths[slot] = message[at.length]
        last[slot], adapters[slot] = message[at.last], message[at.adapter]
        params[slot] = np.ascontiguousarray(message[at.params : at.blocks]).view("f4")
        blocks[:, slot] = message[at.blocks :].reshape(groups, -1)
        counts[slot], bias[slot] = 0, 0
    return Tables(blocks, lengths, last, adapters, params, counts, bias)


def expand_rows(step, tables):
    tokens = len(step.tokens)
    index = np.arange(tokens, dtype=np.int32)
    used = index < step.used_counts[2]
    slots = np.where(used, step.slots[step.rows], 0)
    counts = tables.token_counts[slots]
    for token in np.flatnonzero(used) if counts.shape[1] else ():
        first = step.starts[step.rows[token]]
        np.add.at(counts[token], step.tokens[first:token], 2)
    starts = np.arange(tokens + 1, dtype=np.int32)
    used_counts = np.full(3, step.used_counts[2], np.int32)
    expanded = Step(
        step.tokens, step.positions, step.rows, starts, step.lengths, index,
        step.blocks, step.writes, index, step.adapters, used_counts, step.uniforms,
        step.plan,
    )  # fmt: skip
    zeros = np.zeros(tokens, np.int32)
    blocks = np.zeros((1, tokens, tables.blocks.shape[2]), np.int32)
    params, bias = tables.params[slots], tables.bias[slots]
    return expanded, Tables(blocks, zeros, zeros, zeros, params, counts, bias)


def verify(tokens, step, tables, *, width):
    result = np.full((len(step.slots), width), NO_TOKEN, np.int32)
    lengths, last = tables.lengths.copy(), tables.last.copy()
    counts = tables.token_counts.copy()
    for row, slot in enumerate(step.slots):
        start, stop = step.starts[row : row + 2]
        accepted = min(1, stop - start)
        while accepted < stop - start and (
            tokens[start + accepted - 1] == step.tokens[start + accepted]
        ):
            accepted += 1
        result[row, :accepted] = tokens[start : start + accepted]
        lengths[slot] = step.lengths[row] - (stop - start - accepted)
        last[slot] = max(result[row, accepted - 1], 0) if accepted else 0
        if counts.shape[1]:
            np.add.at(counts[slot], step.tokens[start : start + accepted], 2)
    blocks, adapters = tables.blocks, tables.adapters
    params, bias = tables.params, tables.bias
    kept = Tables(blocks, lengths, last, adapters, params, counts, bias)
    return result.reshape(-1), kept


def sample(logits, step, tables, *, sampler):
    """Greedy, and by temperature; the rest is left to another kernel."""
    slots = np.repeat(step.slots, len(logits) // len(step.slots))
    param = dict(zip(PARAMS, tables.params[slots].T, strict=True))
    heat, uniforms = param["temperature"], step.uniforms.view(np.float32)
    top = logits.max(-1, keepdims=True)
    tokens = np.argmax(logits, -1)
    for row in np.flatnonzero(heat > 0) if sampler == "sample" else ():
        with np.errstate(invalid="ignore"):
            weights = np.exp((logits[row] - top[row]).astype(np.float64) / heat[row])
        sums = np.cumsum(weights)
        tokens[row] = np.searchsorted(sums, uniforms[row] * sums[-1], side="right")
    tokens = np.where(np.isfinite(top[:, 0]), tokens, -1).astype(np.int32)
    last = tables.last.copy()
    last[step.slots] = tokens.reshape(len(step.slots), -1)[:, -1].clip(0)
    return tokens, tables._replace(last=last)


def no_scores(logits, step, tables, *, sampler):
    return "filters no tokens" if sampler == "sample_filtered" else None


KERNELS = [
    *(Kernel(run.__name__, "vendor", run) for run in (make_step, admit)),
    *(Kernel(run.__name__, "vendor", run) for run in (expand_rows, verify)),
    Kernel("sample", "vendor", sample, no_scores, preference=1),
]
