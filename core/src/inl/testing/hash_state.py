"""State of :class:`~inl.testing.hash_runner.HashRunner`: slots, and rows in flight."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from inl.scheduling.sampling_params import sampler_for
from inl.spec.step import PARAMS, Bucket

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.protocol.frame_decoder import StepRow
    from inl.protocol.slot_decoder import AdmitFrame
    from inl.spec.message import BlockTableUpdate, IntArray, TokenBias


@dataclass(slots=True, eq=False)
class SlotState:
    """One admission to a slot, until its release."""

    slot: int
    tables: list[NDArray[np.int64]]
    """[B] block table of each group; replaced, never written to."""
    length: int
    """Tokens cached once every submitted step is computed, at most."""
    last: int
    """Last sampled token of the computed steps."""
    adapter: int
    params: tuple[float, ...]
    counts: Counter[int] = field(default_factory=Counter)
    """As in ``Tables.token_counts``."""
    bias: dict[int, float] = field(default_factory=dict)
    cached: int = field(init=False)
    """Tokens cached by the computed steps."""
    uncertain: int = 0
    """Tokens of ``length`` that drafts in flight may not add."""
    has_steps: bool = False
    """Whether a step had tokens of this slot."""
    queue: deque[RowTask] = field(default_factory=deque)
    """Rows that are submitted and not computed, in order."""
    sampler: str = field(init=False)
    """The cheapest sampler that serves the parameters."""

    def __post_init__(self) -> None:
        self.cached = self.length
        self._select_sampler()

    def _select_sampler(self) -> None:
        params = dict(zip(PARAMS, self.params, strict=True))
        self.sampler = sampler_for(params, special=any(self.bias.values()))

    @classmethod
    def admit(cls, frame: AdmitFrame) -> SlotState:
        """Return the state after an admission."""
        tables = [np.array(ids, np.int64) for ids in frame.blocks]
        return cls(
            frame.slot, tables, frame.length, frame.last, frame.adapter, frame.params
        )

    def update_table(self, update: BlockTableUpdate) -> None:
        """Set one entry of a block table, in a copy: rows in flight use the old one."""
        self.tables = list(self.tables)
        table = self.tables[update.group].copy()
        table[update.entry] = update.block
        self.tables[update.group] = table

    def add_biases(self, biases: list[TokenBias]) -> None:
        """Add counts and biases of tokens."""
        for token, count, bias in biases:
            self.counts[token] += count
            self.bias[token] = self.bias.get(token, 0.0) + bias
        self._select_sampler()


@dataclass(slots=True, eq=False)
class RowTask:
    """One row of a step, with all that it depends on except cache and feedback."""

    step: StepTasks
    index: int
    """Row of the step."""
    state: SlotState
    tables: list[NDArray[np.int64]]
    row: StepRow
    sample: int
    """Index of its first sample in the step."""
    decodes: bool
    """Whether its first token is the slot's last sampled one."""
    done: bool = False


@dataclass(slots=True, eq=False)
class StepTasks:
    """The rows and the sampled tokens of one step in flight."""

    number: int
    bucket: Bucket
    tokens: NDArray[np.int32]
    """[R, W], set row by row."""
    samples: NDArray[np.int32]
    """[S] sampled tokens, rejected ones included."""
    needs_masks: bool
    masks: IntArray | None = None
    hidden: NDArray[np.float32] | None = None
    """[R, H] of a pooled step, set row by row."""
    scored: IntArray | None = None
    """[T] tokens after those of a scored step."""
    rows: list[RowTask] = field(default_factory=list)
