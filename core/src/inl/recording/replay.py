"""Replays a recorded run on another runner and compares its tokens step by step.

A recording may start in the middle of a run. Sequences that were admitted before it,
or that share blocks filled before it, cannot be computed again: their rows are skipped
and counted. After its first different token a sequence has different content, and so
have those that share its blocks from then on; their later rows are skipped too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import ProtocolError
from inl.protocol.frame_decoder import StepFrame, StepRow, read_step
from inl.protocol.runner import Limits, Reply, Runner
from inl.protocol.slot_decoder import read_admission
from inl.recording.trace_file import RunHeader
from inl.scheduling.frame_encoder import STEP_NUMBERS
from inl.spec.message import (
    ADMISSION_WORD,
    ADMIT,
    RELEASE,
    STEP,
    Header,
    Row,
    header,
    step_frame,
)
from inl.spec.step import SAMPLERS, Bucket

if TYPE_CHECKING:
    from inl.spec.message import IntArray


class Difference(NamedTuple):
    """A row of a step whose replayed token differs from the recorded one."""

    step: int
    row: int
    sequence: int
    """Number of its admission in the recording, from 1."""
    slot: int
    position: int
    """Position of the token in its sequence."""
    recorded: int
    replayed: int


@dataclass(slots=True)
class Outcome:
    """Result of a replay."""

    steps: int = 0
    """Recorded steps that have a reply."""
    rows: int = 0
    """Compared rows."""
    skipped: int = 0
    """Rows not compared: started before the recording, or after a difference."""
    sequences: int = 0
    """Admissions of the recording."""
    differences: list[Difference] = field(default_factory=list)
    """The first of each sequence, in the order of steps and rows."""


@dataclass(slots=True, eq=False)
class _Sequence:
    number: int
    table: list[list[int]]
    length: int
    admitted: bool
    """Whether it was admitted to the replaying runner."""
    computable: bool
    """Whether all that it reads was computed by the replaying runner, as recorded."""


def replay(
    items: Iterable[RunHeader | Reply | IntArray], make: Callable[[Limits], Runner]
) -> Outcome:
    """Replay records of :func:`~inl.recording.trace_file.read_trace`.

    make: builds a runner with the recorded slots and blocks, once for each recorded
    run. Raises :class:`~inl.errors.ProtocolError` for records that contradict each
    other, and what the runner raises.
    """
    outcome = Outcome()
    for limits, frames, replies in _runs(items):
        runner = make(replace(limits, buckets=()))
        try:
            run = _Run(runner, limits, outcome)
            for frame in frames:
                run.replay(frame, replies)
        finally:
            runner.close()
    return outcome


def _runs(
    items: Iterable[RunHeader | Reply | IntArray],
) -> Iterator[tuple[Limits, list[IntArray], dict[int, Reply]]]:
    """Yield the limits, frames and replies by step of each run."""
    runs: list[tuple[Limits, list[IntArray], dict[int, Reply]]] = []
    for item in items:
        if isinstance(item, RunHeader):
            runs.append((item.limits, [], {}))
        elif not runs:
            raise ProtocolError("trace: found a frame before the first run header")
        elif isinstance(item, Reply):
            runs[-1][2][item.step] = item
        else:
            runs[-1][1].append(item)
    yield from runs


class _Run:
    """Replays one recorded run."""

    def __init__(self, runner: Runner, limits: Limits, outcome: Outcome) -> None:
        self._runner, self._limits, self._outcome = runner, limits, outcome
        self._steps = 0
        self._sequences: dict[int, _Sequence] = {}
        """By slot."""
        # Block 0 is never read: it replaces blocks that lie before a window.
        self._computed_blocks: list[set[int]] = [{0} for _ in limits.blocks]
        """Blocks of each group whose content here is what was recorded."""

    def replay(self, frame: IntArray, replies: dict[int, Reply]) -> None:
        """Replay a frame; steps without a recorded reply are left out."""
        head = header(frame)
        if head.kind == ADMIT:
            self._admit(frame)
        elif head.kind != STEP:
            self._forward(frame, head)
        elif head.step in replies:
            step = read_step(frame, head, self._limits)
            self._compare(step, replies[head.step], self._compute(step))

    def _forward(self, frame: IntArray, head: Header) -> None:
        """Submit a release or a token bias frame of an admitted slot."""
        if len(frame) <= ADMISSION_WORD.slot:
            raise ProtocolError(f"trace: found a frame of {len(frame)} words, no slot")
        slot = int(frame[ADMISSION_WORD.slot])
        sequence = self._sequences.get(slot)
        if sequence is not None and sequence.admitted:
            self._runner.submit(frame)
        if head.kind == RELEASE:
            self._sequences.pop(slot, None)

    def _admit(self, frame: IntArray) -> None:
        """Submit an admission if its cached blocks were computed here."""
        admission = read_admission(frame, self._limits)
        blocks = -(-admission.length // self._limits.block_size)
        computable = all(
            computed.issuperset(table[:blocks])
            for computed, table in zip(
                self._computed_blocks, admission.blocks, strict=True
            )
        )
        self._outcome.sequences += 1
        number = self._outcome.sequences
        self._sequences[admission.slot] = _Sequence(
            number, admission.blocks, admission.length, computable, computable
        )
        if computable:
            self._runner.submit(frame)

    def _compute(self, step: StepFrame) -> list[int | None]:
        """Return the token computed here for each row; ``None`` if not computable."""
        for update in step.updates:
            if (sequence := self._sequences.get(update.slot)) is not None:
                sequence.table[update.group][update.entry] = update.block
        computable = [self._advance(row) for row in step.rows]
        rows = [row for row, flag in zip(step.rows, computable, strict=True) if flag]
        if not rows:
            return [None] * len(computable)
        slots = {row.slot for row in rows}
        self._steps += 1
        message = step_frame(
            _bucket(step.header.bucket, rows, self._runner.limits),
            [_row(row) for row in rows],
            [update for update in step.updates if update.slot in slots],
            step=self._steps % STEP_NUMBERS,
            groups=self._limits.groups,
            block_size=self._limits.block_size,
            decode_rows=sum(computable[: step.header.decode_rows]),
        )
        self._runner.submit(message)
        tokens = iter(self._runner.collect().tokens[:, 0].tolist())
        return [next(tokens) if flag else None for flag in computable]

    def _advance(self, row: StepRow) -> bool:
        """Record which blocks a row fills; returns whether it is computable here."""
        sequence = self._sequences.get(row.slot)
        if sequence is None:
            return False
        size = self._limits.block_size
        first = sequence.length // size
        sequence.length += len(row.tokens)
        stop = -(-sequence.length // size)
        for computed, table in zip(self._computed_blocks, sequence.table, strict=True):
            if sequence.computable:
                computed.update(table[first:stop])
            else:
                computed.difference_update(table[first:stop])
        return sequence.computable

    def _compare(
        self, step: StepFrame, reply: Reply, tokens: Sequence[int | None]
    ) -> None:
        recorded = reply.tokens[:, 0].tolist()
        if len(recorded) < len(tokens):
            raise ProtocolError(
                f"trace: reply of step {reply.step}: found {len(recorded)} rows, "
                f"the step has {len(tokens)}"
            )
        outcome = self._outcome
        outcome.steps += 1
        for index, (row, token) in enumerate(zip(step.rows, tokens, strict=True)):
            if token is None:
                outcome.skipped += 1
                continue
            outcome.rows += 1
            if token != recorded[index]:
                sequence = self._sequences[row.slot]
                sequence.computable = False
                outcome.differences.append(
                    Difference(
                        step.header.step, index, sequence.number, row.slot,
                        sequence.length, recorded[index], token,
                    )
                )  # fmt: skip


def _row(row: StepRow) -> Row:
    (uniform,) = struct.unpack("<f", struct.pack("<i", row.uniform))
    return Row(row.slot, row.tokens, (uniform,))


def _bucket(recorded: Bucket, rows: Sequence[StepRow], limits: Limits) -> Bucket:
    """Return the recorded bucket, or the smallest of the runner that fits the rows."""
    if not limits.buckets or recorded in limits.buckets:
        return recorded
    tokens = sum(len(row.tokens) for row in rows)
    rank = SAMPLERS.index(recorded.sampler)
    for bucket in sorted(limits.buckets):
        fits = bucket.tokens >= tokens and bucket.rows >= len(rows)
        if (
            fits
            and bucket.tokens_per_row == 1
            and SAMPLERS.index(bucket.sampler) >= rank
        ):
            return bucket
    raise ProtocolError(
        f"trace: a step of {tokens} tokens in {len(rows)} rows "
        f"({recorded.sampler}) fits none of the {len(limits.buckets)} programs here"
    )
