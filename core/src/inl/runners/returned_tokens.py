"""Sampled tokens for the stages of a pipeline that do not sample.

Only the last stage samples. A frame of a step that feeds tokens back is sent to the
other stages once these tokens are known, with the tokens in place of FEEDBACK. Steps
whose tokens do not depend on each other overlap: those of different lanes, see
:mod:`inl.scheduling.lanes`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from inl.errors import ProtocolError
from inl.spec.message import FEEDBACK, POOLED, ROW_WORD, SCORED, layout, row_words
from inl.spec.step import NO_TOKEN

if TYPE_CHECKING:
    from inl.spec.limits import Limits
    from inl.spec.message import Header, IntArray


@dataclass(slots=True, eq=False)
class StepTokens:
    """Tokens of a step, once they are known."""

    number: int
    known: threading.Event = field(default_factory=threading.Event)
    tokens: IntArray | None = None
    """[R, W]; ``None`` if the step has none, or was dropped by a reset."""

    def last(self, row: int) -> int:
        """Wait for the tokens; return the last one of a row, as tables store it."""
        self.known.wait()
        if self.tokens is None:
            return 0
        sampled = self.tokens[row]
        used = sampled[sampled != NO_TOKEN]
        return max(int(used[-1]), 0) if len(used) else 0


@dataclass(frozen=True, slots=True, eq=False)
class StepFrame:
    """The frame of a step whose tokens are not known yet."""

    message: IntArray
    places: list[int]
    """Indices of the words that feed tokens back."""
    sources: list[tuple[StepTokens, int] | None]
    """The step and the row that sampled each of them."""

    @property
    def sampled_by(self) -> set[int]:
        """Numbers of the steps whose tokens it needs."""
        return {source[0].number for source in self.sources if source is not None}

    def filled(self) -> IntArray:
        """Wait for the tokens; return the frame with them."""
        if not self.places:
            return self.message
        copy = self.message.copy()
        for at, source in zip(self.places, self.sources, strict=True):
            copy[at] = 0 if source is None else source[0].last(source[1])
        return copy


class ReturnedTokens:
    """Tokens that steps feed back, by the slot and the step that sampled them.

    ``frame`` and ``clear`` are called by one thread; ``put``, and ``filled`` of the
    frames, by others.
    """

    def __init__(self) -> None:
        self._steps: dict[int, StepTokens] = {}
        """Steps without tokens yet, by number."""
        self._newest: dict[int, tuple[StepTokens, int]] = {}
        """The newest step of each slot, and the row of the slot in it."""

    def frame(self, message: IntArray, head: Header, limits: Limits) -> StepFrame:
        """Register a step and return its frame.

        message: must not change. Raises :class:`~inl.errors.ProtocolError` for a
        repeated step, whose tokens return to each of its steps.
        """
        bucket = head.bucket
        if bucket.repeat > 1:
            raise ProtocolError(
                f"step {head.step}: found {bucket.repeat} steps in one, stages of a "
                "pipeline accept 1"
            )
        place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
        rows = message[place.rows : place.updates]
        rows = rows.reshape(bucket.rows, row_words(bucket))[: head.used_rows]
        slots = rows[:, ROW_WORD.slot].tolist()
        ends = np.cumsum(rows[:, ROW_WORD.token_count])
        given = message[place.tokens : place.tokens + head.used_tokens]
        fed = np.flatnonzero(given == FEEDBACK[0])
        owners = np.searchsorted(ends, fed, side="right").tolist()
        sources = [self._newest.get(slots[owner]) for owner in owners]
        places = (fed + place.tokens).tolist()
        if not head.flags & (POOLED | SCORED):
            step = self._steps[head.step] = StepTokens(head.step)
            self._newest.update((slot, (step, row)) for row, slot in enumerate(slots))
        return StepFrame(message, places, sources)

    def put(self, step: int, tokens: IntArray | None) -> None:
        """Set the tokens of a step; ``None`` for one that was not begun."""
        waiting = self._steps.pop(step, None)
        if waiting is not None:
            waiting.tokens = tokens
            waiting.known.set()

    def clear(self) -> None:
        """Forget all steps; frames that wait for tokens have zeros in their place."""
        for step in list(self._steps):
            self.put(step, None)
        self._newest.clear()
