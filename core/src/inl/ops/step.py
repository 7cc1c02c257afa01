"""From one message to the arrays of a step; integers only.

These bodies are the template for every backend: fixed shapes, no branch on data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    MAX_TOKEN_BIASES,
    ROW_WORD,
    TOKEN_BIAS_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    USED_COUNTS,
    BlockTableUpdate,
    Row,
    TokenBias,
    admit_frame,
    layout,
    release_frame,
    row_words,
    step_frame,
    token_bias_frame,
)
from inl.spec.op import Case, Spec, op
from inl.spec.step import PARAMS, Bucket, Step, Tables


def _step_shapes(_message: Spec, tables: Any, *, bucket: Bucket, **_: Any) -> Any:
    groups, _slots, width = tables.blocks.shape
    tokens, rows, samples = (
        bucket.tokens,
        bucket.rows,
        bucket.rows * bucket.tokens_per_row,
    )
    shapes = Step(
        (tokens,), (tokens,), (tokens,), (rows + 1,), (rows,), (rows,),
        (groups, rows, width), (groups, tokens), (samples,), (rows,), (3,), (samples,),
    )  # fmt: skip
    step = Step(*(Spec(shape, "int32") for shape in shapes[:-1]))
    return step, tables


def empty_tables(
    *,
    groups: int,
    slots: int,
    max_blocks_per_seq: int,
    vocab: int = 0,
    zeros: Callable[[tuple[int, ...], str], Any] = np.zeros,
) -> Tables:
    """Tables in which every slot belongs to nobody.

    vocab: columns of counts and biases; 0 where no "sample_filtered" program is served.
    zeros: allocates by shape and dtype name.
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


def _cases(rng: np.random.Generator) -> Iterable[Case]:
    groups, width, size = 2, 6, 4
    tables = empty_tables(groups=groups, slots=5, max_blocks_per_seq=width, vocab=3)
    tables.blocks[:, 1:] = rng.integers(1, 30, (groups, 4, width))
    tables.lengths[1:] = [5, 0, 7, 11]
    tables.last[1:] = rng.integers(0, 90, 4)
    mixed = [
        Row(3, [-1], [0.25]),
        Row(4, [-1], [0.5]),
        Row(2, [int(x) for x in rng.integers(0, 90, 6)]),
    ]
    cells = [
        BlockTableUpdate(0, 4, 2, 17),
        BlockTableUpdate(1, 4, 2, 18),
        BlockTableUpdate(0, 2, 1, 9),
    ]
    for name, bucket in (
        ("exact", Bucket(8, 3)),
        ("padded", Bucket(12, 6, sampler="sample")),
    ):
        message = step_frame(
            bucket, mixed, cells, step=3, groups=groups, block_size=size, decode_rows=2
        )
        yield Case(name, (message, tables), {"bucket": bucket, "block_size": size})
    bucket = Bucket(6, 2, 3)
    drafts = [Row(1, [-1, 4, 5], [0.1, 0.2, 0.3]), Row(3, [-1], [0.4])]
    message = step_frame(
        bucket, drafts, step=4, groups=groups, block_size=size, decode_rows=2
    )
    yield Case("drafts", (message, tables), {"bucket": bucket, "block_size": size})
    message = step_frame(
        bucket, (), step=4, groups=groups, block_size=size, decode_rows=0
    )
    yield Case("nobody", (message, tables), {"bucket": bucket, "block_size": size})


@op(shapes=_step_shapes, cases=_cases, consumes=("tables",), rounds=False)
def make_step(
    message: Any, tables: Tables, *, bucket: Bucket, block_size: int
) -> tuple[Step, Tables]:
    """Unpack a step's ``message`` against the runner's ``tables``.

    message: int32 [words] laid out by :func:`inl.spec.message.layout`.
    Returns the step and the tables with its cells and lengths applied.
    """
    place = layout(bucket, groups=tables.blocks.shape[0], block_size=block_size)
    rows = message[place.rows : place.updates].reshape(bucket.rows, row_words(bucket))
    updates = message[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
    given = message[place.tokens : place.size]
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
    homes = row_blocks[:, row, positions // block_size]
    writes = np.where(used, homes * block_size + positions % block_size, 0)

    offsets = np.arange(bucket.tokens_per_row, dtype=np.int32) - bucket.tokens_per_row
    samples = np.maximum(ends[:, None] + offsets, starts[:-1, None])
    samples = np.clip(samples, 0, bucket.tokens - 1)
    step = Step(
        tokens=np.where(given < 0, tables.last[slots][row], given),
        positions=positions,
        rows=row,
        starts=starts,
        lengths=after,
        slots=slots.copy(),
        blocks=row_blocks,
        writes=writes.astype(np.int32),
        samples=samples.reshape(-1).astype(np.int32),
        adapters=tables.adapters[slots],
        used_counts=message[USED_COUNTS].copy(),
        uniforms=rows[:, ROW_WORD.uniforms :].reshape(-1).copy(),
    )
    return step, tables._replace(blocks=blocks, lengths=lengths)


def _admit_cases(rng: np.random.Generator) -> Iterable[Case]:
    ids = [[4, 5, 6], [7, 8, 9]]
    params = {"temperature": 0.7, "top_k": 40.0, "presence_penalty": -0.5}
    frame = admit_frame(
        2, ids, groups=2, max_blocks_per_seq=5, length=12, last=7, adapter=1, **params
    )
    for name, vocab in (("", 11), ("/uncounted", 0)):
        tables = empty_tables(groups=2, slots=4, max_blocks_per_seq=5, vocab=vocab)
        tables.blocks[:] = rng.integers(1, 30, tables.blocks.shape)
        tables.lengths[:] = rng.integers(1, 20, 4)
        tables.token_counts[:] = rng.integers(0, 5, tables.token_counts.shape)
        tables.bias[:] = rng.standard_normal(tables.bias.shape)
        released = release_frame(3, groups=2, max_blocks_per_seq=5)
        yield Case(f"admit{name}", (frame[None], tables))
        yield Case(f"release{name}", (released[None], tables))
        three = np.stack((released, np.zeros_like(frame), frame))
        yield Case(f"several{name}", (three, tables))


@op(
    shapes=lambda _messages, tables: tables,
    cases=_admit_cases,
    consumes=("tables",),
    rounds=False,
)
def admit(messages: Any, tables: Tables) -> Tables:
    """Set slots from admissions, or clear them from releases: [n, words], one a row.

    No two are of one slot, but zeros are padding: slot 0 belongs to nobody. No token of
    a slot counts or is biased any more, until marks say so.
    """
    groups, _slots, width = tables.blocks.shape
    at = ADMISSION_WORD
    fresh = Tables(*(array.copy() for array in tables))
    for message in messages:
        slot = message[at.slot]
        params = np.ascontiguousarray(message[at.params : at.blocks]).view(np.float32)
        fresh.blocks[:, slot] = message[at.blocks :].reshape(groups, width)
        fresh.lengths[slot] = message[at.length]
        fresh.last[slot] = message[at.last]
        fresh.adapters[slot] = message[at.adapter]
        fresh.params[slot] = params
        fresh.token_counts[slot] = 0
        fresh.bias[slot] = 0
    return fresh


def _mark_cases(rng: np.random.Generator) -> Iterable[Case]:
    tables = empty_tables(groups=1, slots=4, max_blocks_per_seq=2, vocab=300)
    tables.token_counts[:] = rng.integers(0, 5, tables.token_counts.shape)
    tables.bias[:] = rng.standard_normal(tables.bias.shape)
    for used in (0, 3, MAX_TOKEN_BIASES):
        tokens = rng.permutation(300)[:used]
        marks = [
            TokenBias(int(token), int(rng.integers(0, 9)), float(rng.standard_normal()))
            for token in tokens
        ]
        yield Case(str(used), (token_bias_frame(2, marks), tables))


@op(
    shapes=lambda _message, tables: tables,
    cases=_mark_cases,
    consumes=("tables",),
    rounds=False,
)
def set_token_bias(message: Any, tables: Tables) -> Tables:
    """Add a frame's counts and biases to those of its slot."""
    slot = message[TOKEN_BIAS_WORD.slot]
    entries = message[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
    tokens = entries[:, BIAS_WORD.token]
    counts, bias = tables.token_counts.copy(), tables.bias.copy()
    np.add.at(counts[slot], tokens, entries[:, BIAS_WORD.token_count])
    biases = np.ascontiguousarray(entries[:, BIAS_WORD.bias]).view(np.float32)
    np.add.at(bias[slot], tokens, biases)
    return tables._replace(token_counts=counts, bias=bias)
