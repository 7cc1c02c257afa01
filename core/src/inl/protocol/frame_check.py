"""Refuses a bad frame before anything is consumed for it: a few array comparisons.

A compiled program clamps an index that is out of range and goes on with wrong cells,
and a state that was given up to a step that then fails is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from inl.errors import ProtocolError
from inl.spec.message import (
    HEADER,
    STEP,
    TOKEN_BIAS,
    TOKEN_BIAS_SIZE,
    Header,
    admit_size,
    header,
    layout,
)
from inl.spec.step import PARAMS

if TYPE_CHECKING:
    from inl.spec.limits import Limits
    from inl.spec.message import IntArray

FEW = 64
"""Numbers that are faster to look at one by one."""


class FrameCheck:
    """Knows a runner's limits and how many tokens each slot holds."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lengths = np.zeros(limits.slots, np.int64)

    def read(self, frame: IntArray) -> Header:
        """Check a frame and return its header; raises :class:`ProtocolError`."""
        found = header(frame)
        if found.kind == STEP:
            self._step(frame, found)
        elif found.kind == TOKEN_BIAS:
            self._marks(frame)
        else:
            self._admission(frame)
        return found

    def _step(self, frame: IntArray, found: Header) -> None:
        limits, bucket = self._limits, found.bucket
        if limits.buckets and bucket not in limits.buckets:
            raise ProtocolError(
                f"bucket {tuple(bucket)} has no program; "
                f"there are {[tuple(each) for each in limits.buckets]}"
            )
        if bucket.sampler not in limits.samplers or (
            bucket.sampler == "sample_filtered" and bucket.tokens_per_row > 1
        ):
            raise ProtocolError(
                f"step {found.step}: found a {bucket.sampler} program of width "
                f"{bucket.tokens_per_row}; served are {', '.join(limits.samplers)}, full ones "
                "of width 1"
            )
        place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
        _size(frame, place.size)
        rows = frame[place.rows : place.updates].reshape(bucket.rows, -1)
        slots, counts = rows[:, 0], rows[:, 1]
        _within("slot", slots, 0, limits.slots - 1)
        _within("tokens of a row", counts, 0, bucket.tokens)
        if int(counts.sum()) != found.used_tokens:
            raise ProtocolError(
                f"step {found.step}: its rows have {int(counts.sum())} tokens, "
                f"its header says {found.used_tokens}"
            )
        _within("token", frame[place.tokens :], -1, limits.vocab - 1)
        cells = frame[place.updates : place.tokens].reshape(-1, 4)
        _within("cell's group", cells[:, 0], 0, limits.groups - 1)
        _within("cell's slot", cells[:, 1], 0, limits.slots - 1)
        _within("cell's place", cells[:, 2], 0, limits.max_blocks_per_seq - 1)
        for group, blocks in enumerate(limits.blocks):
            mine = cells[cells[:, 0] == group, 3]
            _within("cell's block", mine, 0, blocks - 1)
        after = self._lengths[slots] + counts
        _within("length", after, 0, limits.max_blocks_per_seq * limits.block_size)
        self._lengths[slots] = np.where(slots > 0, after, 0)

    def _admission(self, frame: IntArray) -> None:
        limits = self._limits
        _size(frame, admit_size(limits.groups, limits.max_blocks_per_seq))
        slot, length, last = frame[HEADER : HEADER + 3].tolist()
        _within("slot", slot, 1, limits.slots - 1)
        _within("length", length, 0, limits.max_blocks_per_seq * limits.block_size)
        _within("last token", last, 0, limits.vocab - 1)
        tables = frame[-limits.groups * limits.max_blocks_per_seq :].reshape(
            limits.groups, -1
        )
        for table, blocks in zip(tables, limits.blocks, strict=True):
            _within("block", table, 0, blocks - 1)
        params = frame[HEADER + 4 : HEADER + 4 + len(PARAMS)].view(np.float32)
        if not np.isfinite(params).all():
            raise ProtocolError(
                f"admission to slot {slot}: found params {params.tolist()}, "
                "accepts finite numbers"
            )
        self._lengths[slot] = length

    def _marks(self, frame: IntArray) -> None:
        limits = self._limits
        _size(frame, TOKEN_BIAS_SIZE)
        if not limits.penalty_vocab:
            raise ProtocolError(f"marks: this runner serves {limits.sampler} at most")
        _within("slot", frame[HEADER], 1, limits.slots - 1)
        marks = frame[HEADER + 2 :].reshape(-1, 3)
        _within("marked token", marks[:, 0], 0, limits.vocab - 1)
        _within("count of a mark", marks[:, 1], 0, 2**30)
        if not np.isfinite(np.ascontiguousarray(marks[:, 2]).view(np.float32)).all():
            raise ProtocolError("bias of a mark: found no number, accepts finite ones")


def _extent(values: Any) -> tuple[int, int]:
    """Least and greatest; NumPy costs more than a few plain ints do."""
    if isinstance(values, int):
        return values, values
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.size <= FEW:
        found = values.tolist()
        return min(found), max(found)
    return np.min(values), np.max(values)


def _size(frame: IntArray, words: int) -> None:
    if frame.shape[0] != words:
        raise ProtocolError(f"frame: found {frame.shape[0]} words, expected {words}")


def _within(what: str, values: Any, low: int, high: int) -> None:
    if not isinstance(values, int) and not values.size:
        return
    least, most = _extent(values)
    if least < low or most > high:
        found = int(least if least < low else most)
        raise ProtocolError(f"{what}: found {found}, accepted: {low} to {high}")
