"""Length of the sequences of a step on the host, to select a program by it."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from inl.backend.base import ContextLengths
from inl.spec.message import (
    ADMISSION_WORD,
    ROW_WORD,
    UPDATE_WORD,
    UPDATE_WORDS,
    Header,
    layout,
)

if TYPE_CHECKING:
    from inl.backend.base import Backend
    from inl.protocol.runner import Limits
    from inl.spec.message import IntArray


class TableWidths:
    """Selects how many columns of the block tables a step reads.

    It counts the blocks of each slot, from the frames that assign them: the number of
    tokens is not known on the host where drafted tokens are rejected.
    """

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self._limits = limits
        self._widths = table_widths(backend, limits)
        self._blocks = np.zeros(limits.slots, np.int64)

    def admit(self, frame: IntArray) -> None:
        """Apply the block tables of an admission; a release has none."""
        if not self._widths:
            return
        tables = frame[ADMISSION_WORD.blocks :].reshape(self._limits.groups, -1)
        columns = np.flatnonzero(tables.any(0))
        slot = frame[ADMISSION_WORD.slot]
        self._blocks[slot] = columns[-1] + 1 if len(columns) else 0

    def select(self, frame: IntArray, head: Header) -> int | None:
        """Apply a step's table updates and return its columns; ``None`` is all."""
        if not self._widths:
            return None
        limits, bucket = self._limits, head.bucket
        place = layout(bucket, groups=limits.groups, block_size=limits.block_size)
        updates = frame[place.updates : place.tokens].reshape(-1, UPDATE_WORDS)
        slots, entries = updates[:, UPDATE_WORD.slot], updates[:, UPDATE_WORD.entry]
        np.maximum.at(self._blocks, slots, np.where(slots > 0, entries + 1, 0))
        rows = frame[place.rows : place.updates].reshape(bucket.rows, -1)
        longest = int(self._blocks[rows[:, ROW_WORD.slot]].max(initial=0))
        at = bisect_left(self._widths, longest)
        return self._widths[at] if at < len(self._widths) else None

    def reset(self) -> None:
        """Forget all slots."""
        self._blocks[:] = 0


def table_widths(backend: Backend, limits: Limits) -> tuple[int, ...]:
    """Return the columns of programs that read less than the whole block table."""
    offered = backend.offers(ContextLengths)
    lengths = offered.lengths(limits) if offered else ()
    widths = {-(-length // limits.block_size) for length in lengths}
    return tuple(sorted(w for w in widths if 0 < w < limits.max_blocks_per_seq))
