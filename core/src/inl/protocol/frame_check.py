"""Fast validation of frames against a runner's limits, before any state is consumed.

A compiled program clamps indices that are out of range and continues with wrong
entries, and the state that a failed step has consumed is lost. The strict validator
for tests is :mod:`inl.protocol.frame_decoder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import ProtocolError
from inl.spec.cache_layout import SLOT_GROUP
from inl.spec.embedded_rows import TokenInputs, read_inputs
from inl.spec.message import (
    ADMISSION_WORD,
    BIAS_WORD,
    BIAS_WORDS,
    DRAFT,
    EMBEDDED,
    FEEDBACK,
    MAX_TRANSFER,
    READ,
    ROW_WORD,
    STEP,
    TOKEN_BIAS,
    TOKEN_BIAS_SIZE,
    TOKEN_BIAS_WORD,
    TRANSFER_SIZE,
    TRANSFER_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    WRITE,
    Header,
    admit_size,
    draft_words,
    header,
    layout,
    steps_word,
    stop_words,
    transferred,
)

if TYPE_CHECKING:
    from inl.spec.limits import Limits
    from inl.spec.message import IntArray
    from inl.spec.step import Bucket

MAX_PYTHON_SCAN = 64
"""Up to this many numbers, Python's min and max are faster than NumPy's."""


class FrameCheck:
    """Validates frames against limits; tracks the tokens cached in each slot.

    After a step that verifies drafts it counts the fewest that a slot can have.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lengths = np.zeros(limits.slots, np.int64)

    def read(self, frame: IntArray) -> Header:
        """Check a frame and return its header; raises :class:`ProtocolError`."""
        head = header(frame)
        self.check(frame, head)
        return head

    def check(self, frame: IntArray, head: Header) -> None:
        """Check a frame whose header has been read; raises :class:`ProtocolError`."""
        if head.kind == STEP:
            self._step(frame, head)
        elif head.kind == TOKEN_BIAS:
            self._token_biases(frame)
        elif head.kind in (READ, WRITE):
            check_transfer(frame, self._limits)
        else:
            self._admission(frame)

    def _step(self, frame: IntArray, head: Header) -> None:
        limits, bucket = self._limits, head.bucket
        self._bucket(bucket, head.step)
        place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
        inputs = None
        if head.flags & EMBEDDED:
            inputs = read_inputs(frame, place.size, head.used_tokens, limits)
            frame = frame[: place.size]
        _check_size(frame, place.size)
        rows = frame[place.rows : place.updates].reshape(bucket.rows, -1)
        slots, counts = rows[:, ROW_WORD.slot], rows[:, ROW_WORD.token_count]
        _check_range("slot", slots, 0, limits.slots - 1)
        _check_range("tokens of a row", counts, 0, bucket.tokens)
        if int(counts.sum()) != head.used_tokens:
            raise ProtocolError(
                f"step {head.step}: found {int(counts.sum())} tokens in its rows, "
                f"{head.used_tokens} in its header"
            )
        least = DRAFT if bucket.tokens_per_row > 1 else FEEDBACK[0]
        _check_range("token", frame[place.tokens :], least, limits.vocab - 1)
        _check_range("draft", rows[:, draft_words(bucket)], 0, limits.vocab - 1)
        updates = frame[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
        self._updates(updates)
        if bucket.repeat > 1:
            counts = self._repeats(rows, counts, bucket)
        if inputs is not None and len(inputs.placed):
            self._placed(inputs, slots, counts, head)
        after = self._lengths[slots] + counts
        _check_range("length", after, 0, limits.max_blocks_per_seq * limits.block_size)
        if bucket.verifies:
            _check_range("tokens of a row", counts, 0, bucket.tokens_per_row)
            after = self._lengths[slots] + np.minimum(counts, 1)
        self._lengths[slots] = np.where(slots > 0, after, 0)

    def _placed(
        self, inputs: TokenInputs, slots: IntArray, counts: IntArray, head: Header
    ) -> None:
        """Check positions along axes, and that spans lie in their row of this step."""
        if head.bucket.verifies or head.bucket.repeat > 1:
            raise ProtocolError(
                f"step {head.step}: positions of tokens need a step that neither "
                "verifies drafts nor repeats"
            )
        ends = np.cumsum(counts)
        rows = np.searchsorted(ends, inputs.placed, side="right")
        before = self._lengths[slots[rows]]
        position = before + inputs.placed - (ends - counts)[rows]
        most = self._limits.max_blocks_per_seq * self._limits.block_size
        _check_range("position along an axis", position[:, None] + inputs.offsets, 0,
                     most)  # fmt: skip
        if not self._limits.spans:
            return
        first, end = inputs.spans.T
        inside = (first <= position) & (position < end)
        whole = (first >= before) & (end <= before + counts[rows])
        if not ((first == 0) & (end == 0) | (inside & whole)).all():
            raise ProtocolError(
                f"step {head.step}: found spans {inputs.spans.tolist()!s:.80}, accepts "
                "those of the token's own row, all of whose tokens are in this step"
            )

    def _repeats(self, rows: IntArray, counts: IntArray, bucket: Bucket) -> IntArray:
        """Check the rows of a repeated step; returns the most tokens of each."""
        _check_range("tokens of a row", counts, 0, 1)
        steps = rows[:, steps_word(bucket)]
        _check_range("steps of a row", steps, 0, bucket.repeat)
        if not np.array_equal(steps > 0, counts > 0):
            raise ProtocolError("steps of a row: found 0 and a token, or no token")
        stops = rows[:, stop_words(bucket)]
        _check_range("stop id of a row, plus 1", stops, 0, self._limits.vocab)
        return steps

    def _bucket(self, bucket: Bucket, step: int) -> None:
        limits = self._limits
        if limits.buckets and bucket not in limits.buckets:
            raise ProtocolError(
                f"step {step}: found bucket {tuple(bucket)}, accepts "
                f"{[tuple(each) for each in limits.buckets]}"
            )
        if bucket.repeat > 1 and bucket.stop_ids != limits.stop_ids:
            raise ProtocolError(
                f"step {step}: found {bucket.stop_ids} stop ids per row, accepts "
                f"{limits.stop_ids}"
            )
        single = bucket.tokens_per_row == 1 or bucket.verifies
        if bucket.sampler not in limits.samplers or (
            bucket.sampler == "sample_filtered" and not single
        ):
            raise ProtocolError(
                f"step {step}: found sampler {bucket.sampler} with "
                f"{bucket.tokens_per_row} tokens per row of {bucket.tokens} tokens in "
                f"{bucket.rows} rows; accepts {', '.join(limits.samplers)}, "
                "sample_filtered with 1 token per row or one sample per token"
            )

    def _updates(self, updates: IntArray) -> None:
        limits, at = self._limits, UPDATE_WORD
        groups, what = updates[:, at.group], "block table update"
        _check_range(f"{what}, group", groups, 0, limits.groups - 1)
        _check_range(f"{what}, slot", updates[:, at.slot], 0, limits.slots - 1)
        most = limits.max_blocks_per_seq - 1
        _check_range(f"{what}, entry", updates[:, at.entry], 0, most)
        for group, blocks in enumerate(limits.blocks):
            ids = updates[groups == group, at.block]
            _check_range(f"{what}, block", ids, 0, blocks - 1)

    def _admission(self, frame: IntArray) -> None:
        limits, at = self._limits, ADMISSION_WORD
        _check_size(frame, admit_size(limits.groups, limits.max_blocks_per_seq))
        slot, length, last, adapter = frame[at.slot : at.params].tolist()
        _check_range("slot", slot, 1, limits.slots - 1)
        _check_range("length", length, 0, limits.max_blocks_per_seq * limits.block_size)
        _check_range("last token", last, 0, limits.vocab - 1)
        _check_range("adapter", adapter, 0, limits.adapters)
        tables = frame[at.blocks :].reshape(limits.groups, -1)
        for table, blocks in zip(tables, limits.blocks, strict=True):
            _check_range("block", table, 0, blocks - 1)
        params = frame[at.params : at.blocks].view(np.float32)
        if not np.isfinite(params).all():
            raise ProtocolError(
                f"admission to slot {slot}: found params {params.tolist()}, "
                "accepts finite numbers"
            )
        self._lengths[slot] = length

    def _token_biases(self, frame: IntArray) -> None:
        limits = self._limits
        _check_size(frame, TOKEN_BIAS_SIZE)
        if not limits.penalty_vocab:
            raise ProtocolError(
                "token biases: need a runner with sampler sample_filtered, "
                f"found {limits.sampler}"
            )
        _check_range("slot", frame[TOKEN_BIAS_WORD.slot], 1, limits.slots - 1)
        entries = frame[TOKEN_BIAS_WORD.entries :].reshape(-1, BIAS_WORDS)
        tokens, counts = entries[:, BIAS_WORD.token], entries[:, BIAS_WORD.token_count]
        _check_range("token bias, token", tokens, 0, limits.vocab - 1)
        _check_range("token bias, count", counts, 0, 2**30)
        biases = np.ascontiguousarray(entries[:, BIAS_WORD.bias]).view(np.float32)
        if not np.isfinite(biases).all():
            raise ProtocolError("token bias, bias: found inf or nan, accepts numbers")


def check_transfer(frame: IntArray, limits: Limits) -> None:
    """Check a READ or WRITE frame; raises :class:`ProtocolError`."""
    at = TRANSFER_WORD
    _check_size(frame, TRANSFER_SIZE)
    _check_range("group", int(frame[at.group]), SLOT_GROUP, limits.groups - 1)
    is_slot = int(frame[at.group]) == SLOT_GROUP
    most = 1 if is_slot else MAX_TRANSFER
    _check_range("number of blocks", int(frame[at.used]), 1, most)
    group, ids = transferred(frame)
    count = limits.slots if is_slot else limits.blocks[group]
    _check_range("slot" if is_slot else "block", np.array(ids), 1, count - 1)
    if len(set(ids)) < len(ids):
        raise ProtocolError(f"blocks: found {ids}, accepts each of them once")


def _check_size(frame: IntArray, words: int) -> None:
    if frame.shape[0] != words:
        raise ProtocolError(f"frame: found {frame.shape[0]} words, expected {words}")


def _check_range(what: str, values: Any, low: int, high: int) -> None:
    """Check an int or an array of any size, an empty one included."""
    if not isinstance(values, int) and not values.size:
        return
    least, most = _extent(values)
    if least < low or most > high:
        wrong = int(least if least < low else most)
        raise ProtocolError(f"{what}: found {wrong}, accepts {low} to {high}")


def _extent(values: Any) -> tuple[int, int]:
    if isinstance(values, int):
        return values, values
    if values.ndim == 1 and values.size <= MAX_PYTHON_SCAN:
        numbers = values.tolist()
        return min(numbers), max(numbers)
    return np.min(values), np.max(values)
