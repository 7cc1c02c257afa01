"""A drafter that runs a draft head on the hidden states of the model it drafts for.

After each step of the model, :meth:`EagleDrafter.observe` computes the head's entries
of the tokens whose successors are known. The last entry of a sequence predicts its next
token but one, since the next one is known; further tokens come from the head's own
output.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from inl.dtypes import cast, wrap
from inl.errors import InlError
from inl.executor.model_executor import MAX_ADMISSIONS
from inl.scheduling.buckets import Buckets
from inl.scheduling.request import Status
from inl.spec.message import Row, admit_frame, step_frame
from inl.speculation.draft_counts import StepTimes, never_falling
from inl.speculation.step_times import GROWTH, PROMPT, RUNS, SECONDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.kv.tier import BlockMove
    from inl.runners.local_runner import LocalRunner
    from inl.scheduling.plan import Chunk
    from inl.scheduling.request import Request
    from inl.spec.step import Bucket
    from inl.speculation.draft_head import DraftExecutor
    from inl.speculation.drafters import DraftQuery

log = logging.getLogger("inl")

RELAXATION: Final = 1.05
"""Factor on the least seconds of a step at each new measurement, which counts if it is
below."""


class Entries(NamedTuple):
    """Positions ``[start, stop)`` of a sequence, whose hidden states are known."""

    request: Request
    start: int
    stop: int
    first: int
    """Row of the first one among the hidden states."""


class Ready(NamedTuple):
    """The first drafted token of a sequence."""

    slot: int
    tokens: int
    """Tokens of the sequence."""
    draft: int
    """The token that follows them, of the draft vocabulary."""
    row: int
    """Row of the hidden states that the next draft is computed from."""


class EagleDrafter:
    """Predicts tokens with a draft head of the model.

    target: runner of the model, with taps. executor: of the head. tokens: [draft_vocab]
    token of the model for each token of the head. group: cache group of the model whose
    blocks the head's cache mirrors. scratch: blocks of a slot for drafted tokens. If
    the head fails, that is logged, and nothing is predicted from then on.
    """

    def __init__(
        self,
        target: LocalRunner,
        executor: DraftExecutor,
        tokens: NDArray[np.int64],
        *,
        group: int,
        scratch: int,
    ) -> None:
        self._target, self._executor, self._tokens = target, executor, tokens
        self._group, self._scratch = group, scratch
        limits = self._limits = executor.limits
        self._buckets = Buckets(
            limits, token_budget=limits.token_budget, max_rows=limits.slots - 1
        )
        self.followed: set[int] = set()
        """Ids of the requests whose entries are computed."""
        self._filled = np.zeros(limits.blocks[0], bool)
        """Whether the cache has all entries of each block."""
        self._times: StepTimes | None = None
        """Seconds of steps of the head by their tokens, see :meth:`measure`."""
        self._token_seconds = 0.0
        """Seconds of each token of a prompt."""
        self._ready: dict[int, Ready] = {}
        self._hidden: Any = None
        """Hidden states of the newest entries, by :attr:`Ready.row`."""
        self._has_failed = False
        self._steps: dict[Bucket, float] = {}
        """Seconds of steps that compute a draft; infinite after the first, which
        compiles."""

    def seconds(self, rows: int, drafts: int) -> float:
        """Seconds of a step for each draft but the first, which is computed before.

        Once measured, with those that compute the entries of as many tokens.
        """
        if self._times is not None:
            entries = self._times.at(rows * (1 + drafts))
            return entries + (drafts - 1) * self._times.at(rows)
        known = [
            (bucket.rows, seconds)
            for bucket, seconds in self._steps.items()
            if seconds < float("inf")
        ]
        enough = [each for each in known if each[0] >= rows]
        _, each = min(enough) if enough else max(known, default=(0, 0.0))
        return (drafts - 1) * each

    def prompt_seconds(self, tokens: int) -> float:
        """Seconds to compute the entries of a prompt, 0 before :meth:`measure`."""
        return tokens * self._token_seconds

    def measure(self, max_rows: int) -> None:
        """Time steps of the head by their rows, and of a prompt, without requests.

        Of about :data:`~inl.speculation.step_times.SECONDS` seconds. Raises what a step
        raises.
        """
        executor, limits = self._executor, self._limits
        seconds: dict[int, float] = {}
        spent, rows = 0.0, 1
        while rows == 1 or (rows <= max_rows and spent < SECONDS):
            seconds[rows] = self._time([1] * rows)
            spent += (1 + RUNS) * seconds[rows]
            rows = max_rows if rows < max_rows < GROWTH * rows else GROWTH * rows
        self._times = StepTimes(never_falling(seconds))
        count = min(PROMPT, limits.token_budget, limits.max_tokens)
        self._token_seconds = self._time([count]) / count
        executor.reset()

    def _time(self, counts: list[int]) -> float:
        """Return the shortest time of a step over these tokens per row, in seconds.

        All sequences write to the first blocks.
        """
        executor, limits = self._executor, self._limits
        most = limits.max_blocks_per_seq
        table = [*range(1, 1 + min(most, limits.blocks[0] - 1))]
        slots = range(1, 1 + len(counts))
        frames = [
            admit_frame(slot, [table], groups=1, max_blocks_per_seq=most)
            for slot in slots
        ]
        config, total = executor.loaded.config, sum(counts)
        zeros = cast(np.zeros((total, config.tapped)), config.dtype)
        source = executor.backend.tensor(zeros)
        rows = [
            Row(slot, [0] * count) for slot, count in zip(slots, counts, strict=True)
        ]
        times: list[float] = []
        for _ in range(1 + RUNS):  # the first one compiles the step
            self._admit_frames(frames)
            began = perf_counter()
            self._run(rows, [*range(total)], source, is_tapped=True)
            times.append(perf_counter() - began)
        return min(times[1:])

    def begin(self, request: Request, start: int) -> None:
        """Follow a request, see :class:`TapDrafter`."""
        table = request.block_table[self._group]
        shared = table[: start // self._limits.block_size]
        if not self._has_failed and self._filled[shared].all():
            self.followed.add(request.id)

    def read_next(self, moves: Sequence[BlockMove], *, is_read: bool) -> None:
        """Prepare for the next step, see :class:`TapDrafter`."""
        for move in moves:
            if move.group == self._group:
                self._filled[move.block] = False
        self._target.read_taps(is_read)

    def observe(self, chunks: Sequence[Chunk]) -> None:
        """Compute the entries of a step's tokens, see :class:`TapDrafter`."""
        self._ready.clear()
        if self._has_failed:
            return
        self._count_filled(chunks)
        if not self.followed:
            return
        try:
            self._executor.reset()  # after an interrupted call only
            followed = self.followed
            self._observe(
                [each for each in _entries(chunks) if each.request.id in followed]
            )
        except InlError as error:
            self._fail(error)

    def _count_filled(self, chunks: Sequence[Chunk]) -> None:
        """Note which blocks that a step has filled have all entries."""
        size = self._limits.block_size
        for request, start, stop, _ in chunks:
            # Without rejected drafts, and the last token, which has no successor.
            known = min(stop, request.scheduled, len(request.tokens) - 1)
            first, last = start // size, known // size
            if first >= last or request.status is not Status.RUNNING:
                continue
            table = request.block_table[self._group]
            self._filled[table[first:last]] = request.id in self.followed

    def _observe(self, entries: list[Entries]) -> None:
        if not entries:
            return
        self._admit(entries)
        rows = [
            Row(each.request.slot, each.request.tokens[each.start + 1 : each.stop + 1])
            for each in entries
        ]
        source = [
            each.first + at for each in entries for at in range(each.stop - each.start)
        ]
        taps = self._target.taps
        drafts, self._hidden = self._run(rows, source, taps, is_tapped=True)
        for row, (request, _, stop, _) in enumerate(entries):
            if stop == len(request.tokens) - 1:
                ready = Ready(request.slot, stop + 1, drafts[row], row)
                self._ready[request.id] = ready

    def propose(self, queries: Sequence[DraftQuery]) -> Sequence[Sequence[int]]:
        proposals: list[list[int]] = [[] for _ in queries]
        try:
            self._propose(queries, proposals)
        except InlError as error:
            self._fail(error)
        return proposals

    def _propose(
        self, queries: Sequence[DraftQuery], proposals: list[list[int]]
    ) -> None:
        """Append predicted tokens to ``proposals``, one of each row in a step."""
        hidden, rows = self._hidden, list[tuple[int, Ready]]()
        for at, query in enumerate(queries):
            ready = self._ready.pop(query.request, None)
            if ready is not None and ready.tokens == len(query.tokens):
                rows.append((at, ready))
        while rows:
            for at, ready in rows:
                if ready.draft >= 0:  # the logits were finite
                    proposals[at].append(int(self._tokens[ready.draft]))
            rows = [
                (at, ready)
                for at, ready in rows
                if ready.draft >= 0 and len(proposals[at]) < queries[at].limit
            ]
            if not rows:
                return
            drafts, hidden = self._run(
                [Row(ready.slot, proposals[at][-1:]) for at, ready in rows],
                [ready.row for _, ready in rows],
                hidden,
                is_tapped=False,
            )
            rows = [
                (at, ready._replace(draft=drafts[row], row=row))
                for row, (at, ready) in enumerate(rows)
            ]

    def _run(
        self, rows: list[Row], source: list[int], hidden: Any, *, is_tapped: bool
    ) -> tuple[list[int], Any]:
        """Compute a step; source: the row of ``hidden`` of each of its tokens."""
        limits = self._limits
        bucket = self._buckets.choose(len(source), len(rows), "greedy")
        single = sum(len(row.tokens) == 1 for row in rows)
        frame = step_frame(
            bucket, rows, step=0, groups=1, block_size=limits.block_size,
            decode_rows=single,
        )  # fmt: skip
        padded = np.zeros(bucket.tokens, np.int32)
        padded[: len(source)] = source
        began = perf_counter()
        tokens, out = self._executor.draft(
            bucket, frame, padded, hidden, is_tapped=is_tapped
        )
        if not is_tapped:
            self._count(bucket, perf_counter() - began)
        return tokens[: len(rows)].tolist(), out

    def _count(self, bucket: Bucket, seconds: float) -> None:
        """Count the seconds of a step that computes a draft."""
        least = self._steps.get(bucket)
        self._steps[bucket] = (
            float("inf") if least is None else min(RELAXATION * least, seconds)
        )

    def _admit(self, entries: list[Entries]) -> None:
        """Set the length and the block table of each slot."""
        most = self._limits.max_blocks_per_seq
        frames = [
            admit_frame(
                each.request.slot, [self._table(each.request)[:most]], groups=1,
                max_blocks_per_seq=most, length=each.start,
            )
            for each in entries
        ]  # fmt: skip
        self._admit_frames(frames)

    def _admit_frames(self, frames: list[NDArray[np.int32]]) -> None:
        limits = self._limits
        for first in range(0, len(frames), MAX_ADMISSIONS):
            batch = np.stack(frames[first : first + MAX_ADMISSIONS])
            if len(batch) > 1 and limits.buckets:
                batch.resize((MAX_ADMISSIONS, batch.shape[1]), refcheck=False)
            self._executor.admit(self._executor.backend.tensor(wrap(batch)))

    def _table(self, request: Request) -> list[int]:
        """Return the blocks of a sequence, then those of its slot."""
        first = self._limits.blocks[0] - self._scratch * (request.slot + 1)
        return [*request.block_table[self._group], *range(first, first + self._scratch)]

    def _fail(self, error: InlError) -> None:
        log.warning("draft head: stopped drafting: %s", error)
        self._has_failed = True
        self.followed.clear()
        self._ready.clear()

    def forget(self, request: int) -> None:
        self.followed.discard(request)
        self._ready.pop(request, None)

    def close(self) -> None:
        self._has_failed = True
        self.followed.clear()
        self._ready.clear()
        self._hidden = None
        self._executor.release()


def _entries(chunks: Sequence[Chunk]) -> list[Entries]:
    """Return the positions of a step that are known; those of one token come first."""
    entries: list[Entries] = []
    first = 0
    for request, start, stop, _ in chunks:
        # Rejected drafts come after the last token, which has no successor.
        known = min(stop, request.scheduled, len(request.tokens) - 1)
        if request.status is Status.RUNNING and known > start:
            entries.append(Entries(request, start, known, first))
        first += stop - start
    return sorted(entries, key=lambda each: each.stop - each.start > 1)
