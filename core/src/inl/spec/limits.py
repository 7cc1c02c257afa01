"""What a runner can hold: slots, blocks, buckets and samplers."""

from __future__ import annotations

from dataclasses import dataclass

from inl.spec.cache import passed_blocks
from inl.spec.step import SAMPLERS, Bucket

TOKEN_BUDGET = 512
"""Tokens of a step where neither an engine nor its backend has a preference."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a runner can hold. Slot 0 and block 0 belong to nobody and are counted."""

    slots: int
    """Sequences at once, plus one."""
    blocks: tuple[int, ...]
    """Blocks of each cache group, plus one each."""
    block_size: int
    """Tokens per block."""
    max_blocks_per_seq: int
    """B: most blocks of one sequence, so ``width * block_size`` tokens at most."""
    vocab: int
    """V: tokens are 0 .. vocab - 1."""
    buckets: tuple[Bucket, ...] = ()
    """Programs that exist, smallest first; empty where every size is served exactly."""
    depth: int = 2
    """Steps that may be in flight."""
    sampler: str = SAMPLERS[-1]
    """The costliest of :data:`SAMPLERS` that is served. "sample_filtered" holds two tables of
    [slots, V] that the others do not need."""

    windows: tuple[int | None, ...] = ()
    """Tokens that a query of each cache group sees, ``None`` for all; empty is all.
    Where there is a window, blocks that lie before it may be block 0 in a table."""
    token_budget: int = TOKEN_BUDGET
    """Most tokens of a step that a scheduler plans unless it is told otherwise."""

    @property
    def samplers(self) -> tuple[str, ...]:
        """Those of :data:`SAMPLERS` that are served."""
        return SAMPLERS[: SAMPLERS.index(self.sampler) + 1]

    @property
    def penalty_vocab(self) -> int:
        """Columns of the tables that only "sample_filtered" needs: V or 0."""
        return self.vocab if self.sampler == "sample_filtered" else 0

    @property
    def groups(self) -> int:
        """G: cache groups."""
        return len(self.blocks)

    def before_window(self, group: int, position: int) -> int:
        """Blocks of a sequence that no query from ``position`` on sees in a group."""
        window = self.windows[group] if self.windows else None
        return passed_blocks(window, position, self.block_size)

    @property
    def max_tokens(self) -> int:
        """Longest sequence that fits."""
        return (
            min(self.max_blocks_per_seq, *(count - 1 for count in self.blocks))
            * self.block_size
        )
