"""Queue of an encoder: the sequences of concurrent calls share programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inl.engine.encoder_load import EncoderLoad
from inl.engine.fair_lock import FairLock
from inl.executor.encoder_executor import MAX_SEQUENCES
from inl.spec.encoder import TokenSequence

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from inl.engine.core import EngineCore


@dataclass(slots=True, eq=False)
class QueuedSequence:
    """A sequence and, once it is computed, its result or its error."""

    sequence: TokenSequence
    result: NDArray[np.float32] | None = field(default=None, repr=False)
    error: Exception | None = None
    dropped: bool = False
    """Whether the caller has given up: it need not be computed."""

    @property
    def done(self) -> bool:
        """Whether it has a result or an error."""
        return self.result is not None or self.error is not None


class EncoderQueue:
    """Encodes sequences in the order in which they come, several in a program.

    Thread-safe: the thread whose turn it is computes what all wait for.
    """

    def __init__(self, core: EngineCore, lock: FairLock) -> None:
        self._core, self._lock = core, lock
        self._waiting: deque[QueuedSequence] = deque()
        self.counts = EncoderLoad(lambda: len(self._waiting))

    def encode(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Return the result [K] of each sequence; raises the error of the first."""
        # Sequences of like lengths share programs with little padding and few sizes.
        queued = [QueuedSequence(each) for each in sequences]
        ordered = sorted(queued, key=lambda each: len(each.sequence.tokens))
        self._waiting.extend(ordered)
        try:
            while not all(each.done for each in queued):
                self._lock.run(self._compute)
        finally:
            for each in queued:
                each.dropped = True
        results = []
        for each in queued:
            if each.error is not None:
                raise each.error
            assert each.result is not None, "it is done"
            results.append(each.result)
        return results

    def _compute(self) -> None:
        """Compute one program of what waits."""
        batch = self._next()
        if not batch:
            return
        try:
            with self.counts.computing():
                rows = self._core.encode([each.sequence for each in batch])
        except Exception as error:
            for each in batch:
                each.error = error
            return
        except BaseException:
            self._waiting.extendleft(reversed(batch))
            raise
        self.counts.computed(len(batch))
        for each, row in zip(batch, rows, strict=True):
            each.result = row

    def _next(self) -> list[QueuedSequence]:
        """Take the first sequences that fit into a program."""
        batch: list[QueuedSequence] = []
        room = self._core.runner.limits.token_budget
        while self._waiting and len(batch) < MAX_SEQUENCES:
            if self._waiting[0].dropped:
                self._waiting.popleft()
                continue
            room -= len(self._waiting[0].sequence.tokens)
            if batch and room < 0:
                break
            batch.append(self._waiting.popleft())
        return batch
