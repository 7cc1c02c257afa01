"""A repeated step as single steps, for backends without loops on the device.

The steps are submitted one after the other without reading a token in between. A row
that stops early computes the rest in vain, within its own blocks; its tokens after the
stop are removed when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from inl.spec.message import (
    FEEDBACK,
    ROW_WORD,
    UPDATE_WORDS,
    Header,
    layout,
    repeated_uniforms,
    row_words,
    steps_word,
    stop_words,
)
from inl.spec.step import MAX_STOP_IDS, NO_TOKEN, Bucket

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.spec.limits import Limits
    from inl.spec.message import IntArray


class SingleSteps:
    """The frames of the single steps of a repeated step, in order."""

    def __init__(self, message: IntArray, head: Header, limits: Limits) -> None:
        bucket = head.bucket
        place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
        rows = message[place.rows : place.updates].reshape(bucket.rows, -1)
        self._message, self._head, self._limits = message, head, limits
        self._rows = rows[: head.used_rows]
        self._tokens = message[place.tokens :][: head.used_rows]
        updates = message[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
        self._updates = _by_need(updates[: head.used_updates])
        """Block table updates that are not sent."""
        self._steps = self._rows[:, steps_word(bucket)]
        self.count = int(self._steps.max(initial=0))
        """Number of single steps."""

    def frame(self, step: int) -> tuple[Bucket, IntArray, IntArray]:
        """Return the bucket, the frame, and the rows of the message that it has.

        Called for each step from 0 on.
        """
        single = self._head.bucket._replace(repeat=1, stop_ids=MAX_STOP_IDS)
        kept = np.flatnonzero(self._steps > step).astype(np.int32)
        if not self._limits.buckets:
            single = single._replace(tokens=len(kept), rows=len(kept))
        groups, size = self._limits.groups, self._limits.block_size
        place = layout(single, groups=groups, block_size=size)
        frame = np.zeros(place.size, np.int32)
        updates = self._updates[: place.max_updates]
        self._updates = self._updates[place.max_updates :]
        used = len(kept)
        frame[: len(Header._fields)] = self._head._replace(
            tokens=single.tokens, rows=single.rows, repeat=0, decode_rows=used,
            used_rows=used, used_tokens=used, used_updates=len(updates), stop_ids=0,
        )  # fmt: skip
        table = frame[place.rows : place.updates].reshape(single.rows, -1)
        table[:used, : ROW_WORD.uniforms] = self._rows[kept, : ROW_WORD.uniforms]
        uniforms = self._rows[:, repeated_uniforms(self._head.bucket)]
        table[:used, ROW_WORD.uniforms] = uniforms[kept, step]
        stop = place.updates + updates.size
        frame[place.updates : stop] = updates.reshape(-1)
        tokens = FEEDBACK[0] if step else self._tokens[kept]
        frame[place.tokens : place.tokens + used] = tokens
        return single, frame, kept


def _by_need(updates: IntArray) -> IntArray:
    """Sort block table updates so that each comes before the step that needs it.

    The n-th block that a sequence gains is needed at step n or later. Blocks that have
    left a window, whose entries become 0, are not needed: where frames have no room
    for these updates, they are left out.
    """
    seen: dict[tuple[int, int], int] = {}
    ranks = []
    for group, slot, _, block in updates.tolist():
        rank = seen.get((group, slot), 0)
        seen[group, slot] = rank + 1 if block else rank
        ranks.append(rank if block else len(updates))
    return updates[np.argsort(np.array(ranks, np.int64), kind="stable")]


def without_stopped(
    tokens: IntArray, message: IntArray, head: Header, limits: Limits
) -> IntArray:
    """Return the tokens [R, N] of a repeated step without those after a stop."""
    bucket = head.bucket
    place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
    rows = message[place.rows : place.updates].reshape(bucket.rows, row_words(bucket))
    stops = rows[:, stop_words(bucket)][:, None]
    ends = (tokens < 0) | ((tokens[:, :, None] + 1 == stops) & (stops > 0)).any(2)
    before = np.cumsum(ends, axis=1) - ends
    return np.where(before > 0, NO_TOKEN, tokens)


def with_repeats(
    buckets: Sequence[Bucket], steps: int, stop_ids: int
) -> tuple[Bucket, ...]:
    """Return buckets with those of repeated steps, where decoding steps have any."""
    decoding = (b for b in buckets if b.tokens == b.rows and b.tokens_per_row == 1)
    repeated = (b._replace(repeat=steps, stop_ids=stop_ids) for b in decoding)
    return (*buckets, *repeated) if steps > 1 else tuple(buckets)


def with_programs(backend: Backend, limits: Limits) -> Limits:
    """Return the limits with the buckets that a runner of ``backend`` compiles."""
    buckets = with_repeats(
        backend.buckets(limits), limits.decode_steps, limits.stop_ids
    )
    return replace(limits, buckets=buckets)
