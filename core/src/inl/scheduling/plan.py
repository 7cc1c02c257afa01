"""Scheduler settings, and the plan of one step that a scheduler makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from inl.kv.snapshots import Restore, Snapshot
from inl.kv.tier import BlockMove
from inl.scheduling.buckets import Buckets
from inl.scheduling.request import Request, StepKind
from inl.scheduling.sampling_params import rank
from inl.spec.limits import TOKEN_BUDGET
from inl.spec.message import BlockTableUpdate
from inl.spec.step import Bucket

REPEAT_SECONDS = 0.1
"""Most expected seconds of a step that is repeated."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How a scheduler uses a runner. Raises ``ValueError`` for a size too small."""

    token_budget: int = TOKEN_BUDGET
    """Maximum number of tokens in a step."""
    inter_token_ms: float | None = None
    """Most expected milliseconds of a step in which sequences decode beside prompts.
    ``None``: a quarter of ``token_budget``, or 2,048 tokens if that is more."""
    max_rows: int | None = None
    """Maximum number of running sequences; ``None`` is one per slot of the runner."""
    context: int | None = None
    """Maximum number of tokens of prompt and output; ``None`` is what the runner's
    blocks hold."""
    eos_ids: frozenset[int] = frozenset()
    """The model's end tokens."""
    use_kv_cache: bool = True
    """``False`` computes the whole sequence again for each token."""
    prefix_cache: bool = True
    """Whether requests share full blocks of equal leading tokens."""
    recomputes_block: bool = False
    """Whether the last block of a cached prefix is computed again, for a draft head
    that reads the hidden states before the first new token."""
    wait_tokens: int = 64
    """Fewest leading tokens for which a request waits if steps in flight compute them
    for another one, and they are at least half of what it lacks."""
    replay: bool = False
    """Whether output tokens are always decoded one by one, also after a preemption. For
    models whose state depends on where the prompt ended; then only blocks of prompts
    are shared."""
    recurrent: bool = False
    """Whether every token changes state that blocks do not hold. Then all tokens are
    computed in order, and blocks are shared only up to a snapshot of the state."""
    snapshot_tokens: int = 64
    """Fewest tokens between snapshots of a sequence, at borders of blocks: the last one
    before the end of its prompt, and that up to which other prompts are equal."""
    snapshot_interval: int = 256
    """Tokens between other snapshots of a sequence, of its output too."""
    model_digest: str = ""
    """Identifies the model and its weights; part of every prefix-cache key."""
    decode_steps: int = 1
    """Most decoding steps that the runner computes in one step."""
    repeat_seconds: float = REPEAT_SECONDS
    """Most expected seconds of a step that is repeated, see
    :mod:`inl.scheduling.repeats`."""
    max_queued_requests: int | None = None
    """Maximum number of requests that wait; ``None`` is any number."""
    max_queued_tokens: int | None = None
    """Maximum number of tokens of the prompts that wait; ``None`` is any number. A
    single prompt may have more."""

    def __post_init__(self) -> None:
        for name in (
            "token_budget",
            "max_rows",
            "context",
            "decode_steps",
            "wait_tokens",
            "snapshot_tokens",
            "snapshot_interval",
            "max_queued_requests",
            "max_queued_tokens",
        ):
            value = getattr(self, name)
            least = 2 if name == "context" else 1
            if value is not None and value < least:
                raise ValueError(f"{name}: found {value}, accepts {least} and above")


class Drafts(NamedTuple):
    """Predicted tokens of a row that verifies them."""

    least: int
    """Lowest position that the row may start at; ``Chunk.start`` is the highest."""
    position: int
    """Position of the first predicted token."""
    tokens: Sequence[int]
    rate: float
    """Acceptance that the drafter expected of them."""


class Chunk(NamedTuple):
    """Tokens ``[start, stop)`` of one request, to be computed in one step."""

    request: Request
    start: int
    stop: int
    drafts: Drafts | None = None
    """Set on every row of a step that verifies drafts. The tokens after the first are
    drafted; earlier rejections shift all of them back, to ``drafts.least`` at most."""

    def drafted(self, start: int) -> Sequence[int]:
        """Return the row's drafted tokens if the first of them is at ``start``."""
        if self.drafts is None:
            return ()
        first = start - self.drafts.position
        return self.drafts.tokens[first : first + self.stop - self.start - 1]


make_chunk = partial(tuple.__new__, Chunk)
"""Make a :class:`Chunk` from a 4-tuple, three times as fast as its constructor: there
is one chunk per row and step."""


class Admission(NamedTuple):
    """A request that gets a slot, with ``length`` tokens already in its blocks."""

    request: Request
    length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, and the frames that precede it, in this order."""

    releases: list[int]
    """Slots to release."""
    admissions: list[Admission]
    block_table_updates: list[BlockTableUpdate]
    """Block table entries that changed since the last step."""
    chunks: list[Chunk]
    """Rows of the step, decoding rows first; empty if there is no step."""
    decode_rows: int = 0
    step: int = 0
    """Number of the step, from 1; 0 if there is no step."""
    bucket: Bucket | None = None
    """Program of the step."""
    tokens: int = 0
    """Number of tokens in the step, without padding."""
    stores: Sequence[BlockMove] = ()
    """Blocks that are read for a tier before all frames."""
    loads: Sequence[BlockMove] = ()
    """Blocks that are written from a tier after these, before all frames."""
    restores: Sequence[Restore] = ()
    """State that is written to slots, before all frames."""
    snapshots: Sequence[Snapshot] = ()
    """State that is read after the step."""

    @property
    def has_drafts(self) -> bool:
        """Whether the step verifies drafts."""
        return self.bucket is not None and self.bucket.verifies

    @property
    def kind(self) -> StepKind:
        """The kind of all its rows."""
        if not self.chunks:
            return StepKind.SAMPLED
        return self.chunks[0].request.step_kind(self.chunks[0].start)

    @property
    def is_repeated(self) -> bool:
        """Whether the step computes several decoding steps."""
        return self.bucket is not None and self.bucket.repeat > 1

    def samples(self, row: int) -> range:
        """Return the indices of a row's samples: one, or its tokens with drafts."""
        if not self.has_drafts:
            return range(row, row + 1)
        counts = [chunk.stop - chunk.start for chunk in self.chunks[: row + 1]]
        return range(sum(counts[:-1]), sum(counts))


class StepBuilder:
    """Collects the rows of one step; :meth:`build` makes the :class:`Plan`."""

    def __init__(
        self, step: int, budget: int, kind: StepKind = StepKind.SAMPLED, ranks: int = 1
    ) -> None:
        self.step = step
        self.kind = kind
        """The kind of all its rows."""
        self.max_tokens = budget
        self.budgets = [budget // ranks] * ranks
        """Tokens of each rank that still fit into the step."""
        self.chunks: list[Chunk] = []
        self.decode_rows = 0
        self.block_table_updates: list[BlockTableUpdate] = []
        self.admissions: list[Admission] = []
        self.prefilling: list[Request] = []
        """Running requests whose prefill is not fully scheduled."""
        self.has_uncertain_rows = False
        """Whether a row needs a step without prompt chunks, see
        :meth:`~inl.scheduling.draft_planner.DraftPlanner.must_wait`."""
        self.program: Bucket | None = None
        """Program of a step that verifies drafts, or is repeated; ``None`` for any
        other step."""

    def schedule(self, request: Request, stop: int) -> None:
        """Add a request's tokens up to ``stop``, as far as the budget allows."""
        start = request.scheduled
        stop = min(stop, start + self.budgets[request.data_rank])
        self.budgets[request.data_rank] -= stop - start
        self.chunks.append(Chunk(request, start, stop))
        request.scheduled = stop
        request.in_flight += 1
        request.last_step = self.step

    def decode(self, request: Request) -> None:
        """Add the token that a request's last step sampled."""
        start = request.scheduled
        stop = request.scheduled = start + 1
        self.budgets[request.data_rank] -= 1
        self.chunks.append(make_chunk((request, start, stop, None)))
        request.in_flight += 1
        request.last_step = self.step

    def admit(self, request: Request) -> None:
        """Add an admission with the request's slot, blocks and cached tokens."""
        request.sent_blocks = len(request.block_table[0])
        self.admissions.append(Admission(request, request.scheduled))

    def send_blocks(self, request: Request, count: int) -> int:
        """Add updates with the blocks up to ``count`` that the runner lacks, per group.

        Returns the number of updates in each group.
        """
        first = request.sent_blocks
        for index in range(first, count):
            for group, blocks in enumerate(request.block_table):
                self.block_table_updates.append(
                    BlockTableUpdate(group, request.slot, index, blocks[index])
                )
        request.sent_blocks = max(first, count)
        return request.sent_blocks - first

    def limit(self, tokens: int, least: int) -> None:
        """Leave room for ``tokens`` in all, but for ``least`` more on each rank."""
        ranks = len(self.budgets)
        for at, budget in enumerate(self.budgets):
            used = self.max_tokens // ranks - budget
            self.budgets[at] = min(budget, max(tokens // ranks - used, least))

    def room(self, request: Request) -> int:
        """Return the tokens of a request that still fit into the step."""
        return self.budgets[request.data_rank]

    @property
    def sampler(self) -> str:
        """The cheapest sampler that serves every row."""
        return max({chunk.request.sampler for chunk in self.chunks}, key=rank)

    def build(
        self,
        releases: list[int],
        buckets: Buckets,
        stores: Sequence[BlockMove] = (),
        loads: Sequence[BlockMove] = (),
        restores: Sequence[Restore] = (),
        snapshots: Sequence[Snapshot] = (),
    ) -> Plan:
        """Choose the program and return the plan."""
        lists = releases, self.admissions, self.block_table_updates, self.chunks
        moves = stores, loads, restores, snapshots
        if not self.chunks:
            return Plan(*lists, 0, 0, None, 0, *moves)
        tokens = sum(chunk.stop - chunk.start for chunk in self.chunks)
        bucket = self.program
        if bucket is None:
            prompts = tokens > len(self.chunks)
            size = buckets.padded(self.chunks)
            bucket = buckets.choose(*size, self.sampler, prompts=prompts)
        return Plan(*lists, self.decode_rows, self.step, bucket, tokens, *moves)
