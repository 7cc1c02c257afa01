"""A recorded run once more, on another runner, compared step by step.

A recording may begin in the middle: sequences that were admitted before it, or that
share blocks which were filled before it, cannot be computed again. Their rows are left
out and counted. After its first different token a sequence is another sequence; so are
those that share its blocks from then on. Nothing more of them is compared.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import ProtocolError
from inl.protocol.frame_decoder import StepFrame, StepRow, read_admission, read_step
from inl.protocol.runner import Limits, Reply, Runner
from inl.protocol.token_masks import TokenMasks, mask_width
from inl.recording.trace_file import Item, RunHeader
from inl.scheduling.frame_encoder import STEP_NUMBERS
from inl.spec.message import (
    ADMIT,
    HEADER,
    MASKED,
    RELEASE,
    STEP,
    Row,
    header,
    step_frame,
)
from inl.spec.step import SAMPLERS, Bucket

if TYPE_CHECKING:
    from inl.spec.message import IntArray


class Difference(NamedTuple):
    """A row of a step for which another token was chosen than recorded."""

    step: int
    row: int
    sequence: int
    """Which admission of the recording, counted from 1."""
    slot: int
    position: int
    """Place of the token in its sequence."""
    recorded: int
    replayed: int


@dataclass(slots=True)
class Outcome:
    """What a replay found."""

    steps: int = 0
    """Steps of the recording that were answered there."""
    rows: int = 0
    """Rows that were compared."""
    skipped: int = 0
    """Rows that could not be: begun before the recording, or after a difference."""
    sequences: int = 0
    """Admissions of the recording."""
    differences: list[Difference] = field(default_factory=list)
    """The first of each sequence, in the order of steps and rows."""


@dataclass(slots=True, eq=False)
class _SlotState:
    number: int
    table: list[list[int]]
    length: int
    held: bool
    """Whether the runner here was told of it."""
    known: bool
    """Whether all that it reads was computed here, as recorded."""


def replay(items: Iterable[Item], make: Callable[[Limits], Runner]) -> Outcome:
    """Feed records of :func:`~inl.recording.trace_file.read_trace` to fresh runners.

    ``make`` builds one that has the recorded slots and blocks, for each recorded run.
    Raises :class:`~inl.errors.ProtocolError` for records that contradict each other,
    and whatever the runner raises.
    """
    outcome = Outcome()
    for limits, frames, replies, masks in _runs(items):
        runner = make(replace(limits, buckets=()))
        try:
            one = _Run(runner, limits, outcome, masks)
            for frame in frames:
                one.feed(frame, replies)
        finally:
            runner.close()
    return outcome


def _runs(
    items: Iterable[Item],
) -> Iterator[tuple[Limits, list[IntArray], dict[int, Reply], dict[int, TokenMasks]]]:
    """Yield the frames of each run, and its replies and masks by step."""
    runs: list[
        tuple[Limits, list[IntArray], dict[int, Reply], dict[int, TokenMasks]]
    ] = []
    for item in items:
        if isinstance(item, RunHeader):
            runs.append((item.limits, [], {}, {}))
        elif not runs:
            raise ProtocolError("trace: found a frame before what was recorded")
        elif isinstance(item, Reply):
            runs[-1][2][item.step] = item
        elif isinstance(item, TokenMasks):
            runs[-1][3][item.step] = item
        else:
            runs[-1][1].append(item)
    yield from runs


class _Run:
    """One runner's part of a recording."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        outcome: Outcome,
        masks: dict[int, TokenMasks],
    ) -> None:
        self._runner, self._limits, self._outcome = runner, limits, outcome
        self._masks = masks
        self._steps = 0
        self._seats: dict[int, _SlotState] = {}
        # Blocks of each group whose content here is what was recorded; a 0 is never
        # read: it stands where a window has passed.
        self._filled: list[set[int]] = [{0} for _ in limits.blocks]

    def feed(self, frame: IntArray, replies: dict[int, Reply]) -> None:
        """Replay a frame; a step that was never answered is left out."""
        found = header(frame)
        if found.kind == ADMIT:
            self._admit(frame)
        elif found.kind != STEP:
            self._tell(frame, releases=found.kind == RELEASE)
        elif found.step in replies:
            step = read_step(frame, found, self._limits)
            self._compare(step, replies[found.step], self._compute(step))

    def _tell(self, frame: IntArray, *, releases: bool) -> None:
        """Pass on what concerns a slot, unless the runner here does not know it."""
        if len(frame) <= HEADER:
            raise ProtocolError(f"trace: found a frame of {len(frame)} words, no slot")
        slot = int(frame[HEADER])
        seat = self._seats.get(slot)
        if seat is not None and seat.held:
            self._runner.submit(frame)
        if releases:
            self._seats.pop(slot, None)

    def _admit(self, frame: IntArray) -> None:
        found = read_admission(frame, self._limits)
        blocks = -(-found.length // self._limits.block_size)
        known = all(
            filled.issuperset(table[:blocks])
            for filled, table in zip(self._filled, found.blocks, strict=True)
        )
        self._outcome.sequences += 1
        number = self._outcome.sequences
        self._seats[found.slot] = _SlotState(
            number, found.blocks, found.length, known, known
        )
        if known:
            self._runner.submit(frame)

    def _compute(self, step: StepFrame) -> list[int | None]:
        """Return what is chosen here for each row; ``None`` where that is unknown."""
        for cell in step.cells:
            if (seat := self._seats.get(cell.slot)) is not None:
                seat.table[cell.group][cell.entry] = cell.block
        known = [self._advance(row) for row in step.rows]
        rows = [row for row, flag in zip(step.rows, known, strict=True) if flag]
        if not rows:
            return [None] * len(known)
        slots = {row.slot for row in rows}
        self._steps += 1
        bucket = _bucket(step.header.bucket, rows, self._runner.limits)
        masks = self._row_masks(step, known)
        message = step_frame(
            bucket,
            [_row(row) for row in rows],
            [cell for cell in step.cells if cell.slot in slots],
            step=self._steps % STEP_NUMBERS,
            groups=self._limits.groups,
            block_size=self._limits.block_size,
            decode_rows=sum(known[: step.header.decode_rows]),
            flags=MASKED if masks is not None else 0,
        )
        self._runner.submit(message)
        if masks is not None:
            width = mask_width(self._limits.vocab)
            self._runner.sample(masks.step, masks.dense(bucket.rows, width))
        tokens = iter(self._runner.collect().tokens[:, 0].tolist())
        return [next(tokens) if flag else None for flag in known]

    def _row_masks(self, step: StepFrame, known: Sequence[bool]) -> TokenMasks | None:
        """Return the recorded masks for the rows that are computed here."""
        if not step.header.flags & MASKED:
            return None
        recorded = self._masks.get(step.header.step)
        if recorded is None:
            raise ProtocolError(
                f"trace: found no masks of step {step.header.step}, which needs them"
            )
        masked = [
            (sum(known[:row]), words)
            for row, words in zip(recorded.rows, recorded.words, strict=True)
            if row < len(known) and known[row]
        ]
        if not masked:
            return None
        rows, words = zip(*masked, strict=True)
        return TokenMasks(self._steps % STEP_NUMBERS, rows, words)

    def _advance(self, row: StepRow) -> bool:
        """Note which blocks a row fills; tell whether it can be computed here."""
        seat = self._seats.get(row.slot)
        if seat is None:
            return False
        size = self._limits.block_size
        first, seat.length = seat.length // size, seat.length + len(row.tokens)
        for filled, table in zip(self._filled, seat.table, strict=True):
            touched = table[first : -(-seat.length // size)]
            if seat.known:
                filled.update(touched)
            else:
                filled.difference_update(touched)
        return seat.known

    def _compare(
        self, step: StepFrame, reply: Reply, found: Sequence[int | None]
    ) -> None:
        recorded = reply.tokens[:, 0].tolist()
        if len(recorded) < len(found):
            raise ProtocolError(
                f"trace: reply of step {reply.step}: found {len(recorded)} rows, "
                f"the step has {len(found)}"
            )
        outcome = self._outcome
        outcome.steps += 1
        for index, (row, token) in enumerate(zip(step.rows, found, strict=True)):
            if token is None:
                outcome.skipped += 1
                continue
            outcome.rows += 1
            if token != recorded[index]:
                seat = self._seats[row.slot]
                seat.known = False
                outcome.differences.append(
                    Difference(
                        step.header.step, index, seat.number, row.slot, seat.length,
                        recorded[index], token,
                    )
                )  # fmt: skip


def _row(row: StepRow) -> Row:
    (uniform,) = struct.unpack("<f", struct.pack("<i", row.uniform))
    return Row(row.slot, row.tokens, (uniform,))


def _bucket(recorded: Bucket, rows: Sequence[StepRow], limits: Limits) -> Bucket:
    """Return the recorded program, or the smallest here that holds the rows."""
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
