"""Adds drafted tokens to the rows of a planned step, for the step to verify."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from inl.scheduling.draft_planner import DraftPlanner
from inl.scheduling.plan import Chunk, Drafts, StepBuilder
from inl.speculation.draft_counts import (
    FORGETTING,
    PRIOR,
    Acceptance,
    DraftCounts,
    StepTimes,
    choose_counts,
)
from inl.speculation.draft_limits import allowed, known_tokens, most_drafts
from inl.speculation.drafters import (
    Drafter,
    DraftQuery,
    RatedDrafter,
    TapDrafter,
    TimedDrafter,
)
from inl.speculation.followed import HORIZON, FollowedRequests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inl.scheduling.buckets import Buckets
    from inl.scheduling.plan import Plan
    from inl.scheduling.request import Request
    from inl.scheduling.running_requests import RunningRequests


OVERHEAD_WEIGHT = 0.3
"""Weight of the newest drafting in the mean of its seconds."""


class Speculation(DraftPlanner):
    """Plans drafts for decoding rows and follows how many are accepted.

    max_drafts: K, most drafts of a row. times: seconds of steps, from which the number
    of drafts is chosen; without them every draft is verified. unmasked: whether steps
    in which a grammar masks logits have no drafts.
    """

    def __init__(
        self, drafter: Drafter, max_drafts: int, times: StepTimes | None = None,
        *, unmasked: bool = False,
    ) -> None:  # fmt: skip
        if max_drafts < 1:
            raise ValueError(f"max_drafts: found {max_drafts}, accepts 1 and above")
        self.drafter = drafter
        self.max_drafts = max_drafts
        self.times = times
        self.unmasked = unmasked
        self.rows = self.drafted = self.accepted = 0
        """Rows with drafts, drafted and accepted tokens of collected steps."""
        self.accepted_at = [0] * max_drafts
        """Accepted tokens by their position in the row's drafts."""
        self.followed: FollowedRequests | None = None
        """Requests that get drafts, of a drafter that reads hidden states."""
        if isinstance(drafter, TapDrafter):
            self.followed = FollowedRequests(drafter, max_drafts, times)
        self._overhead = 0.0
        """Recent seconds of the drafter per step, unless it knows its times."""
        self._read: set[int] = set()
        """Requests that a drafter which knows its times was asked about."""
        self._acceptance: dict[int, dict[float, Acceptance]] = {}
        """Of each request, by the drafter's rate of the drafts."""

    @property
    def width(self) -> int:
        """W: most tokens of a row."""
        return self.max_drafts + 1

    def must_wait(self, request: Request, *, prompts: bool) -> bool:
        return prompts or request.uncertain > 2 * self.max_drafts

    def planned(self, plan: Plan, requests: int, buckets: Buckets) -> bool:
        if self.followed is None:
            return False
        return self.followed.planned(plan, requests, buckets)

    def extend(
        self, step: StepBuilder, requests: RunningRequests, buckets: Buckets
    ) -> None:
        if not buckets.can_verify(self.width):
            return
        rows, followed = step.chunks, self.followed
        if followed is not None and not (followed.has_any or step.has_uncertain_rows):
            return
        if any(chunk.request.moves for chunk in rows):
            return
        masked = any(
            chunk.request.guide is not None or chunk.request.token_mask is not None
            for chunk in rows
        )
        limit = 0 if masked and self.unmasked else self.max_drafts
        rooms = [
            most_drafts(chunk, limit)
            if followed is None or chunk.request in followed
            else 0
            for chunk in rows
        ]
        rates = [PRIOR] * len(rows)
        if not isinstance(self.drafter, RatedDrafter):
            # Asked only if drafts are expected to pay off: some drafters are slow.
            wanted = self._choose(rows, rooms, rates, step, buckets)
            rooms = self._worth_reading(rows, wanted)
        proposals = self._propose(rows, rooms, rates)
        lengths = [
            max(len(tokens) - known_tokens(chunk), 0) if room else 0
            for chunk, tokens, room in zip(rows, proposals, rooms, strict=True)
        ]
        lengths = [min(pair) for pair in zip(lengths, rooms, strict=True)]
        counts, padded, _ = self._choose(
            rows, lengths, rates, step, buckets, are_drafted=True
        )
        if not any(counts) and not step.has_uncertain_rows:
            return
        step.program = buckets.choose_verifier(
            padded, buckets.padded(rows)[1], self.width, step.sampler
        )
        for at, count in enumerate(counts):
            self._extend_row(step, at, count, proposals[at], rates[at], requests)

    def _worth_reading(self, rows: Sequence[Chunk], wanted: DraftCounts) -> list[int]:
        """Return the wanted counts, without those of prompts that cost more to read."""
        drafter, counts = self.drafter, wanted.counts
        if self.times is None or not isinstance(drafter, TimedDrafter):
            return counts
        if self.followed is not None:  # chosen when they began
            return counts
        for at, (request, _, stop, _) in enumerate(rows):
            if not counts[at] or request.id in self._read:
                continue
            left = min(request.max_scheduled - stop, HORIZON)
            if left * wanted.saved > drafter.prompt_seconds(len(request.tokens)):
                self._read.add(request.id)
            else:
                counts[at] = 0
        return counts

    def _propose(
        self, rows: Sequence[Chunk], rooms: Sequence[int], rates: list[float]
    ) -> list[Sequence[int]]:
        """Return the predicted tokens of each row, and set its rate."""
        proposals: list[Sequence[int]] = [()] * len(rows)
        asked: list[int] = []
        for at, room in enumerate(rooms):
            guide = rows[at].request.guide
            if room and guide is not None and guide.forced:
                proposals[at] = guide.forced
            elif room:
                asked.append(at)
        queries = [
            DraftQuery(
                rows[at].request.id,
                rows[at].request.tokens,
                known_tokens(rows[at]) + rooms[at],
            )
            for at in asked
        ]
        if queries:
            began = perf_counter()
            answers = self.drafter.propose(queries)
            seconds = perf_counter() - began
            self._overhead += OVERHEAD_WEIGHT * (seconds - self._overhead)
            if self.followed is not None:
                longest = max(
                    len(tokens) - known_tokens(rows[at])
                    for at, tokens in zip(asked, answers, strict=True)
                )
                self.followed.drafted(len(asked), max(longest, 0), seconds)
            for at, tokens in zip(asked, answers, strict=True):
                proposals[at] = allowed(rows[at].request, tokens)
                if isinstance(self.drafter, RatedDrafter):
                    rates[at] = self.drafter.rate(rows[at].request.id)
        return proposals

    def _choose(
        self,
        rows: Sequence[Chunk],
        available: Sequence[int],
        rates: Sequence[float],
        step: StepBuilder,
        buckets: Buckets,
        *,
        are_drafted: bool = False,
    ) -> DraftCounts:
        """Return the drafts of each row; are_drafted: the available ones are known."""
        ranks, padded = buckets.ranks, buckets.padded(rows)[1]
        sizes = buckets.verifier_sizes(padded, self.width, step.sampler)
        if not any(available) or not sizes:
            return DraftCounts([0] * len(rows), padded)
        spare = [min(sizes[-1], step.max_tokens) // ranks] * ranks
        for chunk in rows:
            spare[chunk.request.data_rank] -= 1
        lengths: list[int] = []
        for chunk, length in zip(rows, available, strict=True):
            rank = chunk.request.data_rank
            lengths.append(min(length, spare[rank]))
            spare[rank] -= lengths[-1]
        stats = [
            self._stats(chunk.request, rate)
            for chunk, rate in zip(rows, rates, strict=True)
        ]
        drafter = self.drafter

        def drafting(count: int) -> float:
            if isinstance(drafter, TimedDrafter):
                timed = drafter if self.followed is None else self.followed
                return 0.0 if are_drafted else timed.seconds(len(rows), count)
            return self._overhead

        acceptance = [each.rate for each in stats]
        chosen = choose_counts(lengths, acceptance, sizes, self.times, drafting)
        if ranks > 1:
            # The program has room for the rank with the most tokens, on each of them.
            drafted = [
                chunk._replace(stop=chunk.stop + more)
                for chunk, more in zip(rows, chosen.counts, strict=True)
            ]
            least = buckets.padded(drafted)[0]
            fitting = next((size for size in sizes if size >= least), least)
            share = min(-(-fitting // ranks), padded // ranks * self.width)
            chosen = chosen._replace(tokens=share * ranks)
        for each, length, count in zip(stats, lengths, chosen.counts, strict=True):
            if length and not count:
                each.pass_by()
        if not any(chosen.counts):
            self._overhead *= FORGETTING
        return chosen

    def _extend_row(
        self,
        step: StepBuilder,
        at: int,
        count: int,
        proposal: Sequence[int],
        rate: float,
        requests: RunningRequests,
    ) -> None:
        request, start, stop, _ = step.chunks[at]
        count = requests.grow_ahead(step, request, stop, count)
        least = start - request.uncertain
        drafts = Drafts(least, len(request.tokens), proposal, rate)
        step.chunks[at] = Chunk(request, start, stop + count, drafts)
        request.scheduled += count
        request.uncertain += count
        step.budgets[request.data_rank] -= count

    def collected(self, chunk: Chunk, accepted: int) -> None:
        request, start, stop, drafts = chunk
        drafted = stop - start - 1
        request.uncertain -= drafted
        request.scheduled -= stop - start - accepted
        if drafted:
            self.rows += 1
            self.drafted += drafted
            self.accepted += accepted - 1
            for position in range(accepted - 1):
                self.accepted_at[position] += 1
            if self.followed is not None:
                self.followed.acceptance.observe(accepted - 1, drafted)
            assert drafts is not None, "rows without drafts have one token"
            self._stats(request, drafts.rate).observe(accepted - 1, drafted)

    def processed(self, chunks: Sequence[Chunk]) -> None:
        if self.followed is not None:
            self.followed.processed(chunks)

    def _stats(self, request: Request, rate: float) -> Acceptance:
        found = self._acceptance.setdefault(request.id, {})
        if rate not in found:
            followed = self.followed
            expected = rate if followed is None else followed.acceptance.rate
            found[rate] = Acceptance(expected)
        return found[rate]

    def forget(self, request: Request) -> None:
        self._acceptance.pop(request.id, None)
        self._read.discard(request.id)
        if self.followed is not None:
            self.followed.forget(request)
        self.drafter.forget(request.id)
