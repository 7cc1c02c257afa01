"""Chooses the requests that a drafter follows by the hidden states of their steps.

A draft head computes its layer for each token of a request that it follows, also where
no draft is verified. So it follows only requests whose drafts are expected to pay for
that when they begin, and those no longer whose steps verified none for a while. All
others run as without speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

from inl.speculation.draft_counts import (
    FORGETTING,
    PRIOR,
    Acceptance,
    DraftCounts,
    StepTimes,
    choose_counts,
)

if TYPE_CHECKING:
    from inl.scheduling.buckets import Buckets
    from inl.scheduling.plan import Chunk, Plan
    from inl.scheduling.request import Request
    from inl.speculation.drafters import TapDrafter

PATIENCE: Final = 8
"""Steps without drafts after which a request is not followed any more."""

LEAST_GAIN: Final = 1.15
"""Least expected speedup for which a request is followed: more than that of a single
step, since many steps depend on the choice, and acceptance varies."""

HORIZON: Final = 256
"""Most tokens that a request is expected to generate still, when its prompt would have
to be read by a drafter first."""

MEMORY: Final = 0.99
"""Weight of earlier drafts of all requests after each row that verifies some."""

ROUNDED: Final = 2
"""Decimals of an acceptance for which a choice is made once."""

OBSERVED: Final = 0.2
"""Weight of the newest step in the mean of drafting times."""

MOST_SLOW: Final = 4.0
"""Most that one step counts for, as a multiple of the measured time: the first steps of
a size compile it."""


class FollowedRequests:
    """The requests that a drafter follows; times: without them, all requests."""

    def __init__(
        self, drafter: TapDrafter, max_drafts: int, times: StepTimes | None
    ) -> None:
        self._drafter, self._max_drafts, self._times = drafter, max_drafts, times
        self.acceptance = Acceptance(PRIOR, MEMORY)
        """Of the drafts of all requests, which is assumed of new ones."""
        self._idle: dict[int, int] = {}
        """Steps of each request since the last one that verified drafts."""
        self._saved: dict[tuple[int, str, float, float], float] = {}
        """Seconds that each token saves, by rows, sampler, acceptance and slowness."""
        self._slowness = 1.0
        """Recent seconds of drafting by those that were measured at the start."""
        self._reading: float | None = None
        """Seconds to read the newest step, unless it had prompts."""

    def __contains__(self, request: Request) -> bool:
        return request.id in self._drafter.followed

    @property
    def has_any(self) -> bool:
        """Whether any request is followed."""
        return bool(self._drafter.followed)

    def planned(self, plan: Plan, requests: int, buckets: Buckets) -> bool:
        """Begin with admitted requests, see :class:`DraftPlanner`."""
        followed = self._drafter.followed
        for request, start in plan.admissions:
            self.forget(request)
            if self._pays(request, start, requests, buckets):
                self._idle[request.id] = 0
                self._drafter.begin(request, start)
        is_read = bool(followed) and any(
            chunk.request.id in followed for chunk in plan.chunks
        )
        self._drafter.read_next(plan.loads, is_read=is_read)
        return is_read

    def processed(self, chunks: Sequence[Chunk]) -> None:
        """Let the drafter read a step; drop requests that verify no drafts."""
        began = perf_counter()
        self._drafter.observe(chunks)
        has_prompts = any(start < request.prefill_len for request, start, *_ in chunks)
        self._reading = None if has_prompts else perf_counter() - began
        if self._times is None or not self.has_any:
            return
        for request, start, stop, _ in chunks:
            idle = self._idle.get(request.id)
            if idle is None or start < request.prefill_len:
                continue
            self._idle[request.id] = idle = 0 if stop - start > 1 else idle + 1
            if idle > PATIENCE:
                self.forget(request)

    def drafted(self, rows: int, drafts: int, seconds: float) -> None:
        """Count the seconds of drafts, at most so many for each of ``rows`` rows."""
        reading, self._reading = self._reading, None
        if reading is None or not drafts:
            return
        expected = self._drafter.seconds(rows, drafts)
        if expected > 0:
            slowness = min((reading + seconds) / expected, MOST_SLOW)
            self._slowness += OBSERVED * (slowness - self._slowness)

    def seconds(self, rows: int, drafts: int) -> float:
        """Return the seconds of drafts, as measured, or more as they were recently."""
        return max(self._slowness, 1.0) * self._drafter.seconds(rows, drafts)

    def forget(self, request: Request) -> None:
        """Follow a request no longer."""
        if self._idle.pop(request.id, None) is not None:
            self._drafter.forget(request.id)

    def pays(self, rows: int, buckets: Buckets) -> bool:
        """Whether drafts are expected to pay for so many requests, before any was seen.

        Without times, they are.
        """
        return self._times is None or self._seconds(rows, "greedy", PRIOR, buckets) > 0

    def _pays(
        self, request: Request, start: int, requests: int, buckets: Buckets
    ) -> bool:
        """Whether a request that begins at ``start`` is expected to become faster."""
        if request.pooled or request.carried is not None:
            return False
        if self._times is None:
            return True
        rows, drafter = max(min(requests, buckets.rows), 1), self._drafter
        left = min(request.max_length - request.prompt_tokens, HORIZON)
        cost = drafter.prompt_seconds(len(request.tokens) - start)
        rate = self.acceptance.rate
        if left * self._seconds(rows, request.sampler, rate, buckets) > cost:
            return True
        # So that drafting is tried again later:
        self._slowness += (1 - FORGETTING) * (1 - self._slowness)
        if left * self._seconds(rows, request.sampler, PRIOR, buckets) > cost:
            self.acceptance.pass_by()
        return False

    def _seconds(self, rows: int, sampler: str, rate: float, buckets: Buckets) -> float:
        """Return the seconds that each token is expected to save, 0 for too few."""
        rate = round(rate, ROUNDED)
        key = rows, sampler, rate, round(max(self._slowness, 1.0), 1)
        if key not in self._saved:
            assert self._times is not None, "checked before"
            least = self._times.without_drafts(rows) / rows * (1 - 1 / LEAST_GAIN)
            saved = self._choose(rows, sampler, rate, buckets).saved
            self._saved[key] = saved if saved > least else 0.0
        return self._saved[key]

    def _choose(
        self, rows: int, sampler: str, rate: float, buckets: Buckets
    ) -> DraftCounts:
        sizes = buckets.verifier_sizes(rows, self._max_drafts + 1, sampler)
        if not sizes:
            return DraftCounts([0] * rows, rows)
        counts, rates = [self._max_drafts] * rows, [rate] * rows
        return choose_counts(
            counts, rates, sizes, self._times,
            lambda drafts: self.seconds(rows, drafts),
        )  # fmt: skip
