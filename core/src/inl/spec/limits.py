"""Capacity of a runner: slots, blocks, buckets and samplers."""

from __future__ import annotations

from dataclasses import dataclass

from inl.spec.cache import passed_blocks
from inl.spec.step import MAX_STOP_IDS, SAMPLERS, Bucket

TOKEN_BUDGET = 512
"""Tokens per step if neither the engine nor its backend sets a budget."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacity of a runner. Counts include slot 0 and block 0, reserved for padding."""

    slots: int
    """Sequences that can run at the same time, plus one."""
    blocks: tuple[int, ...]
    """Blocks of each cache group, plus one each."""
    block_size: int
    """Tokens per block."""
    max_blocks_per_seq: int
    """B: columns of a block table. A sequence has at most
    ``max_blocks_per_seq * block_size`` tokens."""
    vocab: int
    """V: token ids are 0 .. vocab - 1."""
    buckets: tuple[Bucket, ...] = ()
    """Compiled programs, smallest first; empty if every size has its exact program."""
    depth: int = 2
    """Steps that may be in flight."""
    sampler: str = "sample_filtered"
    """Most expensive of :data:`SAMPLERS` that is available. "sample_filtered" allocates
    two tables of [slots, V] that the others do not need."""

    windows: tuple[int | None, ...] = ()
    """Attention window of each cache group in tokens, ``None`` for full attention;
    empty is full attention in all groups. Table entries of blocks that precede the
    window may be block 0."""
    token_budget: int = TOKEN_BUDGET
    """Default for the number of tokens that a scheduler plans per step at most."""

    decode_steps: int = 1
    """N: most steps of a repeated step; 1 if no step is repeated."""
    max_drafts: int = 0
    """K: most drafted tokens of a row; 0 if no program has to verify drafts."""
    adapters: int = 0
    """Adapters that can be loaded at the same time, numbered from 1; 0 if programs have
    no room for any."""
    adapter_rank: int = 0
    """Maximum rank of an adapter."""
    embedding: int = 0
    """H: elements of a row of embeddings that steps may have in place of tokens; 0 if
    the runner takes none."""
    stop_ids: int = MAX_STOP_IDS
    """Most stop ids of each row of a repeated step: that of its buckets."""
    axes: int = 0
    """Axes along which tokens of a step may have positions of their own; 0 if its model
    has none."""
    spans: bool = False
    """Whether spans of tokens may attend to each other in both directions."""
    feature_layers: tuple[int, ...] = ()
    """F: layers after which a step may add features to the hidden states."""
    stages: int = 1
    """Steps that a pipeline computes at the same time, if none feeds back the tokens of
    another; 1 on one device."""
    data_ranks: int = 1
    """D: ranks that divide the rows of a step. The sequence in slot s is computed, and
    cached, by rank ``(s - 1) % D`` alone, which has ``blocks`` of its own. A bucket has
    room for ``rows / D`` rows of ``tokens / D`` tokens of each."""

    @property
    def takes_rows_only(self) -> bool:
        """Whether embeddings are the only inputs of tokens beside their ids."""
        return not (self.axes or self.spans or self.feature_layers)

    @property
    def samplers(self) -> tuple[str, ...]:
        """The available ones of :data:`SAMPLERS`."""
        return SAMPLERS[: SAMPLERS.index(self.sampler) + 1]

    @property
    def penalty_vocab(self) -> int:
        """Columns of the tables that only "sample_filtered" needs: V or 0."""
        return self.vocab if self.sampler == "sample_filtered" else 0

    @property
    def groups(self) -> int:
        """G: number of cache groups."""
        return len(self.blocks)

    def before_window(self, group: int, position: int) -> int:
        """Leading blocks that no query from ``position`` on attends to in a group."""
        window = self.windows[group] if self.windows else None
        return passed_blocks(window, position, self.block_size)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits."""
        return (
            min(self.max_blocks_per_seq, *(count - 1 for count in self.blocks))
            * self.block_size
        )
