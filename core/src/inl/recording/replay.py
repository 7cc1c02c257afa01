"""Replays a recorded run on another runner and compares its tokens step by step.

A recording may start in the middle of a run. Sequences that were admitted before it,
or that share blocks filled before it, cannot be computed again: their rows are skipped
and counted. After its first different token a sequence has different content, and so
have those that share its blocks from then on; their later rows are skipped too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import ProtocolError
from inl.protocol.frame_check import check_transfer
from inl.protocol.frame_decoder import StepFrame, StepRow, read_step
from inl.protocol.runner import AdapterSource, CacheWrite, Limits, Reply, Runner
from inl.protocol.slot_decoder import read_admission
from inl.protocol.token_masks import TokenMasks, mask_width
from inl.recording.outcome import Difference, Outcome
from inl.recording.trace_file import Item, RunHeader
from inl.spec.cache_layout import SLOT_GROUP
from inl.spec.embedded_rows import with_rows
from inl.spec.message import (
    ADMISSION_WORD,
    ADMIT,
    FEEDBACK,
    MASKED,
    POOLED,
    READ,
    RELEASE,
    SCORED,
    STEP,
    STEP_NUMBERS,
    UPDATE_WORD,
    UPDATE_WORDS,
    Header,
    Row,
    header,
    layout,
    step_frame,
    transferred,
)
from inl.spec.step import INVALID_TOKEN, NO_TOKEN, SAMPLERS, Bucket

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.spec.message import IntArray

HIDDEN_ERROR = 0.05
"""Largest difference of a hidden state that counts as equal, relative to its length."""


@dataclass(slots=True, eq=False)
class _Sequence:
    number: int
    table: list[list[int]]
    length: int
    admitted: bool
    """Whether it was admitted to the replaying runner."""
    computable: bool
    """Whether all that it reads was computed by the replaying runner, as recorded."""
    last: int = NO_TOKEN
    """Last token that was recorded."""


def replay(items: Iterable[Item], make: Callable[[Limits], Runner]) -> Outcome:
    """Replay records of :func:`~inl.recording.trace_file.read_trace`.

    make: builds a runner with the recorded slots and blocks, once for each recorded
    run. Raises :class:`~inl.errors.ProtocolError` for records that contradict each
    other, and what the runner raises.
    """
    outcome = Outcome()
    for recorded in map(_with_one_pool, _runs(items)):
        runner = make(replace(recorded.limits, buckets=()))
        try:
            run = _Run(runner, recorded, outcome)
            for frame in recorded.frames:
                run.replay(frame)
        finally:
            runner.close()
    return outcome


class _Recording(NamedTuple):
    """The records of one run; replies and masks by step."""

    limits: Limits
    frames: list[IntArray | AdapterSource | CacheWrite]
    replies: dict[int, Reply]
    masks: dict[int, TokenMasks]


def _runs(items: Iterable[Item]) -> list[_Recording]:
    runs: list[_Recording] = []
    for item in items:
        if isinstance(item, RunHeader):
            runs.append(_Recording(item.limits, [], {}, {}))
        elif not runs:
            raise ProtocolError("trace: found a frame before the first run header")
        elif isinstance(item, Reply):
            runs[-1].replies[item.step] = item
        elif isinstance(item, TokenMasks):
            runs[-1].masks[item.step] = item
        else:
            runs[-1].frames.append(item)
    return runs


def _with_one_pool(recorded: _Recording) -> _Recording:
    """Return a run of ranks that divide the rows with the blocks of all in one pool."""
    limits = recorded.limits
    ranks = limits.data_ranks
    if ranks == 1:
        return recorded
    import numpy as np

    sizes = np.array(limits.blocks) - 1

    def moved(frame: IntArray) -> IntArray:
        head, frame = header(frame), frame.copy()
        if head.kind == ADMIT:
            tables = frame[ADMISSION_WORD.blocks :].reshape(limits.groups, -1)
            owner = (int(frame[ADMISSION_WORD.slot]) - 1) % ranks
            tables += np.where(tables > 0, owner * sizes[:, None], 0).astype(np.int32)
        elif head.kind == STEP:
            sized = {"groups": limits.groups, "block_size": limits.block_size}
            place = layout(head.bucket, **sized)
            updates = frame[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
            group, blocks = updates[:, UPDATE_WORD.group], updates[:, UPDATE_WORD.block]
            owners = (updates[:, UPDATE_WORD.slot] - 1) % ranks
            blocks += np.where(blocks > 0, owners * sizes[group], 0).astype(np.int32)
        return frame

    frames = [
        moved(each) if isinstance(each, np.ndarray) else each
        for each in recorded.frames
    ]
    pool = tuple(int(size) * ranks + 1 for size in sizes)
    return recorded._replace(
        limits=replace(limits, blocks=pool, data_ranks=1), frames=frames
    )


class _Run:
    """Replays one recorded run."""

    def __init__(self, runner: Runner, recorded: _Recording, outcome: Outcome) -> None:
        self._runner, self._recorded, self._outcome = runner, recorded, outcome
        self._limits = limits = recorded.limits
        self._steps = 0
        self._sequences: dict[int, _Sequence] = {}
        """By slot."""
        # Block 0 is never read: it replaces blocks that lie before a window.
        self._computed_blocks: list[set[int]] = [{0} for _ in limits.blocks]
        """Blocks of each group whose content here is what was recorded."""

    def replay(self, frame: IntArray | AdapterSource | CacheWrite) -> None:
        """Replay a frame; steps without a recorded reply are left out."""
        if isinstance(frame, AdapterSource):
            self._runner.load_adapter(frame)
            return
        if isinstance(frame, CacheWrite):
            self._write(frame)
            return
        head = header(frame)
        if head.kind == ADMIT:
            self._admit(frame)
        elif head.kind == READ:
            """What is read changes nothing."""
        elif head.kind != STEP:
            self._forward(frame, head)
        elif head.step in self._recorded.replies:
            step = read_step(frame, head, self._limits)
            reply = self._recorded.replies[head.step]
            self._compare(step, reply, self._compute(step, reply))

    def _write(self, recorded: CacheWrite) -> None:
        """Write recorded contents, where the runner's cache has their layout."""
        check_transfer(recorded.message, self._limits)
        group, ids = transferred(recorded.message)
        layout = self._runner.cache_layout
        try:
            fits = layout is not None
            if layout is not None:
                layout.check(group, len(ids), recorded.parts)
        except ProtocolError:
            fits = False
        if fits:
            self._runner.write(*recorded)
        if group != SLOT_GROUP:
            blocks = self._computed_blocks[group]
            (blocks.update if fits else blocks.difference_update)(ids)

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

    def _compute(self, step: StepFrame, reply: Reply) -> list[list[int] | None]:
        """Return the tokens computed here for each row; ``None`` if not computable."""
        if step.has_more_inputs:
            raise ProtocolError(
                f"trace: step {step.header.step} has positions, spans or features of "
                "tokens, found in a replay; accepted: ids and embeddings"
            )
        for update in step.updates:
            if (sequence := self._sequences.get(update.slot)) is not None:
                sequence.table[update.group][update.entry] = update.block
        computable = [
            self._advance(row, count)
            for row, count in zip(step.rows, _accepted(step, reply), strict=True)
        ]
        rows = [row for row, flag in zip(step.rows, computable, strict=True) if flag]
        if not rows:
            return [None] * len(computable)
        slots = {row.slot for row in rows}
        self._steps += 1
        bucket = _bucket(step.header.bucket, rows, self._runner.limits)
        masks = self._row_masks(step, computable)
        embeddings = step.kept_embeddings(computable)
        message = step_frame(
            bucket,
            [_row(row) for row in rows],
            [update for update in step.updates if update.slot in slots],
            step=self._steps % STEP_NUMBERS,
            groups=self._limits.groups,
            block_size=self._limits.block_size,
            decode_rows=sum(computable[: step.header.decode_rows]),
            flags=MASKED
            if masks is not None
            else step.header.flags & (POOLED | SCORED),
        )
        if embeddings:
            message = with_rows(message, embeddings, self._limits)
        self._runner.submit(message)
        if masks is not None:
            width = mask_width(self._limits.vocab)
            self._runner.sample(masks.step, masks.dense(bucket.samples, width))
        found = self._runner.collect()
        tokens = iter(found.tokens.tolist())
        if reply.hidden is not None:
            kept = reply.hidden[: len(computable)][computable]
            tokens = iter(_compared(kept, found.hidden))
        return [next(tokens) if flag else None for flag in computable]

    def _row_masks(
        self, step: StepFrame, computable: Sequence[bool]
    ) -> TokenMasks | None:
        """Return the recorded masks of the rows that are computable."""
        if not step.header.flags & MASKED:
            return None
        recorded = self._recorded.masks.get(step.header.step)
        if recorded is None:
            raise ProtocolError(
                f"trace: found no masks of step {step.header.step}, which needs them"
            )
        samples = list(computable)
        if step.header.bucket.verifies:
            pairs = zip(step.rows, computable, strict=True)
            samples = [flag for row, flag in pairs for _ in row.tokens]
        masked = [
            (sum(samples[:at]), words)
            for at, words in zip(recorded.rows, recorded.words, strict=True)
            if at < len(samples) and samples[at]
        ]
        if not masked:
            return None
        rows, words = zip(*masked, strict=True)
        return TokenMasks(self._steps % STEP_NUMBERS, rows, words)

    def _advance(self, row: StepRow, accepted: int) -> bool:
        """Record which blocks a row writes to; returns whether it is computable here.

        accepted: tokens that it adds to the sequence.
        """
        sequence = self._sequences.get(row.slot)
        if sequence is None:
            return False
        size = self._limits.block_size
        first = sequence.length // size
        stop = -(-(sequence.length + len(row.tokens) + row.steps - 1) // size)
        sequence.length += accepted
        for computed, table in zip(self._computed_blocks, sequence.table, strict=True):
            if sequence.computable:
                computed.update(table[first:stop])
            else:
                computed.difference_update(table[first:stop])
        return sequence.computable

    def _compare(
        self, step: StepFrame, reply: Reply, tokens: Sequence[list[int] | None]
    ) -> None:
        recorded = reply.tokens.tolist()
        if len(recorded) < len(tokens):
            raise ProtocolError(
                f"trace: reply of step {reply.step}: found {len(recorded)} rows, "
                f"the step has {len(tokens)}"
            )
        outcome = self._outcome
        outcome.steps += 1
        for index, (row, found) in enumerate(zip(step.rows, tokens, strict=True)):
            if found is None:
                outcome.skipped += 1
                continue
            sequence = self._sequences[row.slot]
            ended = row.tokens == [*FEEDBACK] and sequence.last in row.stop_ids
            sequence.last = _last(recorded[index])
            if ended:
                continue  # the tokens of a sequence that has ended are undefined
            outcome.rows += 1
            if found != recorded[index]:
                sequence.computable = False
                pairs = list(zip(recorded[index], found, strict=True))
                at = next(at for at, (one, other) in enumerate(pairs) if one != other)
                accepted = _count(recorded[index])
                outcome.differences.append(
                    Difference(
                        step.header.step, index, sequence.number, row.slot,
                        sequence.length - accepted + 1 + at, *pairs[at],
                    )
                )  # fmt: skip


def _compared(
    recorded: NDArray[np.float32], found: NDArray[np.float32] | None
) -> list[list[int]]:
    """Return ``NO_TOKEN`` for each equal hidden state, else ``INVALID_TOKEN``.

    States of other kernels differ by their rounding.
    """
    import numpy as np

    if found is None or found.shape[1:] != recorded.shape[1:]:
        return [[INVALID_TOKEN]] * len(recorded)
    error = np.linalg.norm(found[: len(recorded)] - recorded, axis=-1)
    equal = error <= HIDDEN_ERROR * np.linalg.norm(recorded, axis=-1)
    return [[NO_TOKEN if each else INVALID_TOKEN] for each in equal]


def _accepted(step: StepFrame, reply: Reply) -> list[int]:
    """Return the tokens that each row adds to its sequence."""
    if step.header.bucket.reply_width == 1:
        return [len(row.tokens) for row in step.rows]
    counts = [_count(ids) for ids in reply.tokens.tolist()[: len(step.rows)]]
    return counts + [0] * (len(step.rows) - len(counts))


def _last(ids: Sequence[int]) -> int:
    return ids[max(_count(ids), 1) - 1]


def _count(ids: Sequence[int]) -> int:
    return sum(token != NO_TOKEN for token in ids)


def _row(row: StepRow) -> Row:
    count = len(row.uniforms)
    packed = struct.pack(f"<{count}i", *row.uniforms)
    uniforms = struct.unpack(f"<{count}f", packed)
    return Row(row.slot, row.tokens, uniforms, row.drafts, row.steps, row.stop_ids)


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
            and bucket.tokens_per_row == recorded.tokens_per_row
            and bucket.verifies == recorded.verifies
            and bucket.repeat == recorded.repeat
            and SAMPLERS.index(bucket.sampler) >= rank
        ):
            return bucket
    raise ProtocolError(
        f"trace: a step of {tokens} tokens in {len(rows)} rows "
        f"({recorded.sampler}) fits none of the {len(limits.buckets)} programs here"
    )
