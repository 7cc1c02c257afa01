"""Decodes messages into the arrays of a step and the tables, in place with NumPy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from inl.ops import catalog
from inl.spec.kernel import Kernel
from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    DRAFT,
    HEADER_WORD,
    ROW_WORD,
    TOKEN_BIAS_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    USED_COUNTS,
    draft_words,
    layout,
    uniform_words,
)
from inl.spec.op import Spec
from inl.spec.step import Bucket, Step, Tables
from inl.spec.tree import leaves, tree_map
from inl_cpu.tensor import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from inl_cpu.command_emitter import CommandEmitter


def make_step(
    emitter: CommandEmitter,
    message: Any,
    tables: Tables,
    *,
    bucket: Bucket,
    block_size: int,
) -> tuple[Step, Tables]:
    shapes = catalog()["make_step"].shapes
    assert shapes is not None, "make_step is a primitive"
    specs, _ = shapes(message, tables, bucket=bucket, block_size=block_size)
    step: Step = tree_map(lambda spec: emitter.new(spec.shape, np.int32), specs)
    reader = StepReader(plain(message), tables, step, bucket, block_size)
    emitter.python(reader, [message])
    return step, tables


class StepReader:
    """Fills the arrays of a step from the current contents of a message."""

    def __init__(
        self, message: Any, tables: Tables, step: Step, bucket: Bucket, size: int
    ) -> None:
        offsets = layout(bucket, groups=tables.blocks.shape[0], block_size=size)
        rows = message[offsets.rows : offsets.updates].reshape(bucket.rows, -1)
        self._message, self._tables = message, tables
        self._step: Step = tree_map(plain, step)
        self._bucket, self._size = bucket, size
        self._slots = rows[:, ROW_WORD.slot]
        self._counts = rows[:, ROW_WORD.token_count]
        self._uniforms = rows[:, uniform_words(bucket)]
        self._drafts = rows[:, draft_words(bucket)]
        updates = message[offsets.updates : offsets.tokens].reshape(-1, UPDATE_WORDS)
        at = UPDATE_WORD
        self._entries = updates[:, at.group], updates[:, at.slot], updates[:, at.entry]
        self._blocks = updates[:, at.block]
        self._tokens = message[offsets.tokens : offsets.size]
        self._index = np.arange(bucket.tokens, dtype=np.int32)
        self._offsets = np.arange(-bucket.tokens_per_row, 0, dtype=np.int32)
        self._row_ids = np.arange(bucket.rows, dtype=np.int32)
        self._single_token = bucket[:3] == (1, 1, 1)

    def __call__(self) -> None:
        """Apply the message to the tables and read the step out of both."""
        step, tables = self._step, self._tables
        if self._message[HEADER_WORD.used_updates]:
            tables.blocks[self._entries] = self._blocks
        if self._single_token and self._counts[0] == 1:
            self._read_single_token()
            return
        step.slots[:] = slots = self._slots
        before = tables.lengths[slots]
        np.multiply(before + self._counts, self._counts > 0, out=step.lengths)
        tables.lengths[slots] = step.lengths
        step.starts[0] = 0
        np.cumsum(self._counts, out=step.starts[1:])
        self._fill_positions(before)
        np.take(tables.blocks, slots, axis=1, out=step.blocks)
        self._fill_writes()
        self._fill_tokens()
        step.adapters[:] = tables.adapters[slots]
        step.used_counts[:] = self._message[USED_COUNTS]
        self._fill_uniforms()

    def _read_single_token(self) -> None:
        """Decode one token of one sequence with scalars, to minimize its latency."""
        step, tables = self._step, self._tables
        slot, token = int(self._slots[0]), int(self._tokens[0])
        position, size = int(tables.lengths[slot]), self._size
        tables.lengths[slot] = step.lengths[0] = position + 1
        step.slots[0] = slot
        step.starts[0], step.starts[1] = 0, 1
        step.rows[0] = step.samples[0] = 0
        step.positions[0] = position
        step.tokens[0] = tables.last[slot] if token < 0 else token
        step.blocks[:, 0] = tables.blocks[:, slot]
        blocks = step.blocks[:, 0, position // size]
        step.writes[:, 0] = blocks * size + position % size
        step.adapters[0] = tables.adapters[slot]
        step.used_counts[:] = self._message[USED_COUNTS]
        step.uniforms[0] = self._uniforms[0, 0]

    def _fill_positions(self, before: Any) -> None:
        """Set the row and position of each token; both 0 for padding."""
        step, used = self._step, int(self._step.starts[-1])
        step.rows[:used] = np.repeat(self._row_ids, self._counts)
        step.rows[used:] = 0
        shift = before - step.starts[:-1]
        np.add(shift[step.rows], self._index, out=step.positions)
        step.positions[used:] = 0

    def _fill_writes(self) -> None:
        step, size = self._step, self._size
        blocks = step.blocks[:, step.rows, step.positions // size]
        np.add(blocks * np.int32(size), step.positions % size, out=step.writes)
        step.writes[:, int(step.starts[-1]) :] = 0

    def _fill_tokens(self) -> None:
        step, tables = self._step, self._tables
        last = tables.last[self._slots][step.rows]
        step.tokens[:] = np.where(self._tokens < 0, last, self._tokens)
        if drafts := self._drafts.shape[1]:
            drafted = self._drafts[step.rows, step.positions % drafts]
            np.copyto(step.tokens, drafted, where=self._tokens == DRAFT)
        if self._bucket.verifies:
            step.samples[:] = self._index
            return
        samples = step.starts[1:, None] + self._offsets
        np.maximum(samples, step.starts[:-1, None], out=samples)
        np.minimum(samples, self._bucket.tokens - 1, out=samples)
        step.samples[:] = samples.reshape(-1)

    def _fill_uniforms(self) -> None:
        """Set the uniform number of each sampled position."""
        step, count = self._step, self._uniforms.shape[1]
        if count == 1:
            step.uniforms[:] = self._uniforms[:, 0]
            return
        at = (step.positions[step.samples] + 1) % count
        step.uniforms[:] = self._uniforms[step.rows[step.samples], at]


def prune_last_layer(emitter: CommandEmitter, step: Step) -> Step:
    shapes = catalog()["prune_last_layer"].shapes
    assert shapes is not None, "prune_last_layer is a primitive"
    pruned: Step = tree_map(partial(_allocate, emitter), shapes(step))
    step = step._replace(plan=())
    source, target = (tree_map(plain, each) for each in (step, pruned))
    index = np.arange(source.lengths.shape[0] + 1, dtype=np.int32)

    def run() -> None:
        samples, used = source.samples, source.used_counts[1]
        for name in ("tokens", "positions", "rows"):
            np.take(getattr(source, name), samples, out=getattr(target, name))
        np.take(source.writes, samples, axis=1, out=target.writes)
        np.minimum(index, used, out=target.starts)
        target.samples[:] = index[:-1]
        target.used_counts[:] = used

    emitter.python(run, list(leaves(step)))
    return pruned


def _allocate(emitter: CommandEmitter, leaf: Any) -> Any:
    """Memory for a new array; arrays of the rows are shared with the full step."""
    return emitter.new(leaf.shape, np.int32) if isinstance(leaf, Spec) else leaf


def admit(messages: Any, tables: Tables) -> Tables:
    """Apply admission messages to the tables in place."""
    groups, _slots, width = tables.blocks.shape
    at = ADMISSION_WORD
    for message in messages:
        slot = message[at.slot]
        tables.blocks[:, slot] = message[at.blocks :].reshape(groups, width)
        tables.lengths[slot] = message[at.length]
        tables.last[slot] = message[at.last]
        tables.adapters[slot] = message[at.adapter]
        tables.params[slot] = message[at.params : at.blocks].view(np.float32)
        tables.token_counts[slot] = 0
        tables.bias[slot] = 0
    return tables


def set_token_bias(message: Any, tables: Tables) -> Tables:
    """Add the token counts and biases of a message in place."""
    slot = message[TOKEN_BIAS_WORD.slot]
    entries = message[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
    tokens = entries[:, BIAS_WORD.token]
    np.add.at(tables.token_counts[slot], tokens, entries[:, BIAS_WORD.token_count])
    biases = np.ascontiguousarray(entries[:, BIAS_WORD.bias]).view(np.float32)
    np.add.at(tables.bias[slot], tokens, biases)
    return tables


def kernels(emitter: CommandEmitter) -> Iterable[Kernel]:
    """Step kernels; integers only, hence batch-invariant."""
    runs: dict[str, Callable[..., Any]] = {
        "make_step": partial(make_step, emitter),
        "prune_last_layer": partial(prune_last_layer, emitter),
        "admit": admit,
        "set_token_bias": set_token_bias,
    }
    for op, run in runs.items():
        yield Kernel(op, "numpy_in_place", run, invariant=True)
