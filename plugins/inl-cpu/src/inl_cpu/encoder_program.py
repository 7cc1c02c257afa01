"""The program of an encoder of texts, recorded once for each size of a batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inl.spec.encoder import SequenceBatch
from inl_cpu.memory import empty
from inl_cpu.program import MAX_PROGRAMS, RecordedSteps

if TYPE_CHECKING:
    from inl_cpu.command_emitter import CommandEmitter

EXACT: Final = 64
"""Tokens up to which each even number of them has a recording of its own. A single row
takes as long as two."""

STEP: Final = 16
"""More tokens are padded to a multiple of this, with tokens of no sequence."""


def size_of(tokens: int, sequences: int) -> tuple[int, int]:
    """Return the tokens and sequences of the recording for a batch."""
    step = STEP if tokens > EXACT else 2
    tokens = -(-tokens // step) * step
    return tokens, 1 << (sequences - 1).bit_length()


class EncoderProgram:
    """A function of (weights, batch), recorded when a size is first needed.

    A batch whose inputs are not token ids, as of images, is computed at once.
    """

    def __init__(self, function: Callable[..., Any], emitter: CommandEmitter) -> None:
        self._function, self._emitter = function, emitter
        self._weights: Any = None
        self._recorded: OrderedDict[tuple[int, int], RecordedBatch] = OrderedDict()

    def __call__(self, weights: Any, batch: SequenceBatch) -> tuple[Any, ...]:
        if batch.tokens.ndim != 1:
            result: tuple[Any, ...] = self._function(weights, batch)
            return result
        if weights is not self._weights:
            self._recorded.clear()
            self._weights = weights
        size = size_of(batch.tokens.shape[0], batch.starts.shape[0] - 1)
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = RecordedBatch(self._function, self._emitter, weights, size)
            self._recorded[size] = recorded
            if len(self._recorded) > MAX_PROGRAMS:
                self._recorded.popitem(last=False)
        self._recorded.move_to_end(size)
        return recorded(batch)


class RecordedBatch:
    """The recording for batches of one size."""

    def __init__(
        self, function: Callable[..., Any], emitter: CommandEmitter, weights: Any,
        size: tuple[int, int],
    ) -> None:  # fmt: skip
        tokens, sequences = size
        ids, positions, kinds = (empty((tokens,), np.int32) for _ in range(3))
        for array in (ids, positions, kinds):
            array[:] = 0
        starts = empty((sequences + 1,), np.int32)
        self._batch = SequenceBatch(ids, positions, kinds, starts)
        with emitter.record() as recording:
            traced = SequenceBatch(
                *map(emitter.traced, (ids, positions, kinds, starts))
            )
            results = function(weights, traced)
        self._steps = RecordedSteps(recording, results, emitter.machine)

    def __call__(self, batch: SequenceBatch) -> tuple[Any, ...]:
        """Run it on a batch; its results are copies."""
        tokens, sequences = batch.tokens.shape[0], batch.starts.shape[0] - 1
        for own, given in zip(self._batch[:3], batch[:3], strict=True):
            own[:tokens] = given
        self._batch.starts[: sequences + 1] = batch.starts
        self._batch.starts[sequences + 1 :] = batch.starts[-1]
        return tuple(result[:sequences] for result in self._steps())
