"""Token masks of masked steps, computed on threads while the device works."""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from inl.errors import RequestError
from inl.forks import on_fork
from inl.protocol.token_masks import TokenMasks
from inl.runners.rank_threads import RankThreads, Round
from inl.scheduling.guide import Guide, restore
from inl.scheduling.request import Request, Status
from inl.spec.message import STEP_NUMBERS

if TYPE_CHECKING:
    from inl.scheduling.plan import Plan
    from inl.spec.message import IntArray

MAX_THREADS = 4


class ComputedMasks(NamedTuple):
    """Masks of one step, and the errors of requests whose mask allows nothing."""

    masks: TokenMasks
    errors: list[tuple[Request, Exception]]


class StepMasks:
    """Computes the masks of one step at a time.

    :meth:`begin` starts as soon as the tokens that the masks depend on are known, and
    :meth:`result` waits for them. Not thread-safe.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time to compute masks, on the slowest thread of each step."""
        self.wait_seconds = 0.0
        """Part of it that :meth:`result` waited for."""
        self._threads: RankThreads | None = None
        self._round: Round | None = None
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Forget the parent's threads."""
        self._threads = self._round = None

    def begin(self, plan: Plan, rows: Sequence[int]) -> None:
        """Start to compute the masks of ``rows``; one step at a time."""
        if self._threads is None:
            count = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
            self._threads = RankThreads(count, name="inl-masks")
        count = len(self._threads)
        self._round = Round(lambda rank: _compute(plan, rows[rank::count]), count)
        self._threads.send(self._round)

    def result(self, plan: Plan) -> ComputedMasks:
        """Wait for the masks of the step that :meth:`begin` was called with."""
        assert self._round is not None, "begin comes first"
        started = perf_counter()
        self._round.wait()
        self.wait_seconds += perf_counter() - started
        parts: list[_Part] = list(self._round.results.values())
        self._round = None
        self.seconds += max(part.seconds for part in parts)
        found = {at: mask for part in parts for at, mask in part.masks.items()}
        step = plan.step % STEP_NUMBERS
        masks = TokenMasks(step, tuple(found), tuple(found.values()))
        return ComputedMasks(masks, [each for part in parts for each in part.errors])

    def settle(self) -> None:
        """Wait until no thread uses a guide, and drop what was computed."""
        if self._round is not None and self._threads is not None:
            self._threads.send(self._round)  # begin may have been interrupted
            self._round.wait()
        self._round = None


class _Part(NamedTuple):
    """What one thread computed."""

    masks: dict[int, IntArray]
    """By sample."""
    errors: list[tuple[Request, Exception]]
    seconds: float


def are_ready(plan: Plan, rows: Sequence[int]) -> bool:
    """Whether the tokens that the masks of ``rows`` depend on are collected."""
    chunks = (plan.chunks[row] for row in rows)
    return all(
        request.guide is None
        or stop <= len(request.tokens)
        or request.in_flight == 1
        or request.status is Status.FINISHED
        for request, _, stop, _ in chunks
    )


def _compute(plan: Plan, rows: Sequence[int]) -> _Part:
    started = perf_counter()
    part = _Part({}, [], 0.0)
    for row in rows:
        chunk = plan.chunks[row]
        request, _, stop, _ = chunk
        samples = plan.samples(row)
        # The sample is not used once the request has ended or has later tokens.
        if request.status is Status.FINISHED or stop < len(request.tokens):
            continue
        try:
            masks = _masks(request, chunk.drafted(len(request.tokens)), len(samples))
            part.masks.update(zip(samples, masks, strict=False))
        except Exception as error:
            part.errors.append((request, error))
    return part._replace(seconds=perf_counter() - started)


def _masks(request: Request, drafts: Sequence[int], samples: int) -> Sequence[IntArray]:
    """Return the masks of a row's samples.

    There are fewer if the grammar does not allow a draft: no later sample is used.
    """
    static, guide = request.token_mask, request.guide
    if guide is None:
        assert static is not None, "only rows with a mask are computed"
        return [static] * samples
    masks = _guided(request, guide, drafts)
    if static is not None:
        masks &= static
    if not masks[0].any():
        raise RequestError(
            "allowed_token_ids: excludes every token that the grammar, min_tokens or "
            f"bad_words allow after {len(request.output_ids)} tokens of output"
        )
    return list(masks)


def _guided(request: Request, guide: Guide, drafts: Sequence[int]) -> IntArray:
    try:
        return guide.masks(drafts)
    except RequestError:
        if not drafts:
            raise
        # The grammar is too complex after a draft, which may be rejected.
        restore(guide, request.output_ids)
        return guide.masks()
