"""A group of ranks: one runner each, called from its own thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from inl.errors import (
    InlError,
    ModelError,
    OutOfMemory,
    ProtocolError,
    RunnerError,
    WorkerLost,
)
from inl.protocol.runner import (
    AdapterSource,
    PendingRead,
    PipelinedRunner,
    Reply,
    Runner,
    StepInFlight,
)
from inl.runners.rank_threads import RankThreads, Round
from inl.runners.returned_tokens import ReturnedTokens, StepFrame
from inl.runners.row_shares import StepShares, all_ranks_limits, slot_share
from inl.runners.worker_runner import WorkerRunner
from inl.spec.cache_layout import HEADS, divided, joined
from inl.spec.message import STEP, Header

if TYPE_CHECKING:
    from inl.spec.cache_layout import CacheLayout, Parts
    from inl.spec.message import IntArray


OUT_OF_MEMORY_SECONDS = 5.0
"""Time for all ranks to run out of memory in a step, once one of them has."""


LOSS_SECONDS = 2.0
"""Time for the ranks of a failed group to find that a worker is lost."""


SEND_SECONDS = 1.0
"""Time for the newest call to return before the group is closed without it."""


class _Failure(NamedTuple):
    rank: int
    cause: BaseException


@dataclass(slots=True, eq=False)
class _Work:
    """A step in flight."""

    shares: StepShares | None = None
    """Its parts, if ranks divide the rows."""
    call: Round | None = None
    """The call that collects it."""


@final
class RankRunner(PipelinedRunner):
    """Sends every frame to all ranks and checks that they sample the same tokens.

    make: builds a rank's runner, called as ``make(rank)`` on that rank's thread; an
    InlError that it raises is raised here as it is. abort: makes ranks that wait for
    other ranks fail at once. stages: of the pipeline that the ranks are. copies: ranks
    next to each other that cache the same heads, since they only share experts.
    data_ranks: parts of the ranks, in order, that divide the rows of each step; then a
    rank gets a frame with its own rows, and only the ranks of a part sample the same
    tokens.

    The first failure of a rank ends the group. It is raised once, from its cause, as
    :class:`~inl.errors.RunnerError` (:class:`~inl.errors.WorkerLost` if the rank's
    process is gone); later calls raise RunnerError. If all ranks run out of memory in
    a step, ``collect`` raises :class:`~inl.errors.OutOfMemory` for that step alone; if
    only some do, or with several stages, the group ends with that error.
    """

    def __init__(
        self,
        make: Callable[[int], Runner],
        ranks: int,
        *,
        abort: Callable[[], None],
        stages: int = 1,
        copies: int = 1,
        data_ranks: int = 1,
    ) -> None:
        super().__init__()
        if ranks < 1:
            raise RunnerError(f"ranks: found {ranks}, accepted: 1 and more")
        self._abort_ranks = abort
        self._stages, self._copies = stages, copies
        self._data_ranks, self._part = data_ranks, max(ranks // data_ranks, 1)
        self._first_sampling = ranks - ranks // stages
        """The first rank of the last stage, which samples the tokens."""
        self._sampling = range(self._first_sampling, ranks)
        self._returned = ReturnedTokens()
        self._uncollected: list[deque[int]] = [deque() for _ in range(ranks)]
        """Steps of each rank that were not collected, oldest first; with stages."""
        self._early: dict[tuple[int, int], Reply | OutOfMemory] = {}
        """(rank, step) -> reply that was collected before the engine asks for it."""
        self._lock = threading.Lock()
        self._failure: _Failure | None = None
        self._refusal = ""
        """Message of the error that every call raises, once the failure was raised."""
        self._out_of_memory: dict[tuple[int, int], OutOfMemory] = {}
        """(rank, step) -> error of a rank that did not begin the step."""
        self._threads = RankThreads(ranks)
        self._last_round = Round(lambda _: None, ranks)
        self._closing: Round | None = None
        try:
            self.runners: list[Runner] = self._results(self._on_all_ranks(make))
        except RunnerError as error:
            self._threads.join()
            cause = error.__cause__
            if isinstance(cause, InlError):
                raise cause from cause.__cause__
            raise
        self.limits = all_ranks_limits(self.runners[0].limits, data_ranks)

    def _submit_frame(self, message: IntArray, head: Header) -> _Work | None:
        if self._data_ranks > 1:
            return self._submit_shares(message, head)
        self._submit_to_all(message, head)
        return _Work() if head.kind == STEP else None

    def _submit_shares(self, message: IntArray, head: Header) -> _Work | None:
        """Submit to each rank its rows of a step, or the frame of one of its slots."""
        part = self._part
        if head.kind == STEP:
            shares = StepShares(message, head, self.limits)
            frames = [share.frame for share in shares.parts]
            self._on_all_ranks(lambda r: self._submit_to(r, frames[r // part], head))
            return _Work(shares)
        owner, frame = slot_share(message, head, self._data_ranks)

        def submit(rank: int) -> None:
            if rank // part == owner:
                self._submit_to(rank, frame, head)

        self._on_all_ranks(submit)
        return None

    def _submit_to_all(self, message: IntArray, head: Header) -> None:
        frame = message.copy()
        if head.kind != STEP or self._stages == 1:
            self._on_all_ranks(lambda rank: self._submit_to(rank, frame, head))
            return
        returned = self._returned.frame(frame, head, self.limits)
        self._on_all_ranks(lambda rank: self._submit_stage(rank, returned, head))

    def _submit_stage(self, rank: int, frame: StepFrame, head: Header) -> None:
        # The last stage may wait in this step for another one, which waits for these
        # tokens. The others have computed the steps that sampled them, or wait here
        # for a worker that is lost.
        while frame.sampled_by & {*self._uncollected[rank]}:
            step = self._uncollected[rank][0]
            self._early[rank, step] = self._collect_tokens(rank, step)
        samples = rank in self._sampling
        self._submit_to(rank, frame.message if samples else frame.filled(), head)
        self._uncollected[rank].append(head.step)

    def _sample(self, flight: StepInFlight, masks: IntArray) -> None:
        step, part = flight.head.step, self._part
        shares: StepShares | None = flight.work.shares
        words = [masks.copy()] if shares is None else shares.masks(masks)
        self._on_all_ranks(lambda r: self._sample_on(r, step, words[r // part]))

    def _collect(self, flight: StepInFlight) -> Reply:
        step = flight.head.step
        # An interrupted call has left the ranks' pending replies.
        work: _Work = flight.work
        if work.call is None:
            work.call = self._on_all_ranks(lambda r: self._collect_from(r, step))
        replies = self._replies(work.call)
        if work.shares is None:
            self._check_agreement(step, flight.head.used_rows, replies)
            return replies[0]
        for number, share in enumerate(work.shares.parts):
            first = number * self._part
            own = replies[first : first + self._part]
            self._check_agreement(step, len(share.rows), own, first)
        return work.shares.joined(replies[:: self._part])

    @property
    def cache_layout(self) -> CacheLayout | None:
        """The layout of one rank, with the heads of all ranks along "tensor"."""
        layout = self.runners[0].cache_layout
        divided = self._stages > 1 or self._data_ranks > 1
        if layout is None or layout.slotted or divided:
            # How ranks divide the state of a slot is up to the model, and a stage has
            # only its own layers. Ranks that divide the rows have blocks of their own.
            return None
        ranks = len(self._threads) // self._copies
        groups = (g._replace(kv_heads=g.kv_heads * ranks) for g in layout.groups)
        return layout._replace(groups=tuple(groups))

    def _read(self, pending: PendingRead) -> Parts:
        if not isinstance(pending.work, Round):
            pending.work = self._on_all_ranks(lambda rank: self.runners[rank].read())
        return joined(self._results(pending.work)[:: self._copies], HEADS)

    def _write(self, message: IntArray, parts: Parts) -> None:
        frame = message.copy()
        shares = divided(parts, len(self._threads) // self._copies, HEADS)
        self._on_all_ranks(
            lambda rank: self.runners[rank].write(frame, shares[rank // self._copies])
        )

    def _load_adapter(self, source: AdapterSource) -> None:
        errors = self._results(self._on_all_ranks(lambda r: self._load_on(r, source)))
        for error in filter(None, errors):
            raise error

    def _load_on(self, rank: int, source: AdapterSource) -> InlError | None:
        try:
            self.runners[rank].load_adapter(source)
        except (ModelError, OutOfMemory) as error:
            return error
        return None

    def _abort(self) -> None:
        """Make ranks fail that wait for others, and calls that wait for tokens end."""
        self._abort_ranks()
        self._returned.clear()

    def _reset(self) -> None:
        self._returned.clear()
        # An exception may have kept the newest call from some of the ranks.
        self._threads.send(self._last_round)
        self._results(self._on_all_ranks(lambda rank: self.runners[rank].reset()))
        for steps in self._uncollected:
            steps.clear()
        self._early.clear()
        self._out_of_memory.clear()

    def _close(self) -> None:
        self._last_round.wait(SEND_SECONDS)
        sent = len(self._last_round.results) == len(self._threads)
        if self._in_flight or self._failure is not None or not sent:
            # A rank may wait for another one that will not reach the collective.
            self._abort()
        # In parallel: leaving a process group may wait for the other ranks.
        if self._closing is None:
            self._closing = Round(self._close_rank, len(self._threads))
        self._threads.send(self._closing)
        self._threads.join()
        for error in self._closing.results.values():
            if error is not None:
                raise error

    def _close_rank(self, rank: int) -> BaseException | None:
        try:
            self.runners[rank].close()
        except BaseException as error:
            return error
        return None

    def _check_alive(self) -> None:
        if self._refusal:
            raise RunnerError(self._refusal)
        if self._failure is not None:
            self._raise_failure()

    def _raise_failure(self) -> None:
        assert self._failure is not None
        rank, cause = self._failure
        what = f"rank {rank} of {len(self._threads)} failed"
        self._refusal = f"{what} before; create another runner"
        kinds = (WorkerLost, OutOfMemory)
        kind = next((each for each in kinds if isinstance(cause, each)), RunnerError)
        raise kind(f"{what}: {type(cause).__name__}: {cause}") from cause

    def _on_all_ranks(self, call: Callable[[int], Any]) -> Round:
        """Queue ``call(rank)`` on every rank's thread; a failed group skips it."""

        def guarded(rank: int) -> Any:
            if self._failure is not None or self._closed:
                return None
            return self._guarded(rank, call)

        self._last_round = Round(guarded, len(self._threads))
        self._threads.send(self._last_round)
        return self._last_round

    def _guarded(self, rank: int, call: Callable[[int], Any]) -> Any:
        try:
            return call(rank)
        except BaseException as error:
            self._record_failure(_Failure(rank, error))
            self._abort()
            return None

    def _record_failure(self, failure: _Failure) -> None:
        """Keep the first failure, or a lost worker, which explains the others."""
        with self._lock:
            first, lost = self._failure, isinstance(failure.cause, WorkerLost)
            if first is None or (lost and not isinstance(first.cause, WorkerLost)):
                self._failure = failure

    def _find_losses(self, failure: _Failure) -> None:
        """Record a lost worker: the rank that failed first may have waited for it.

        No call of it may have found that: a failed group skips calls, and the lost one
        may have answered all of its own.
        """
        if isinstance(failure.cause, WorkerLost) or not hasattr(self, "runners"):
            return
        # On each rank's thread, which may still receive from the worker.
        call = Round(self._is_lost, len(self._threads))
        self._threads.send(call)
        call.wait(LOSS_SECONDS, enough=bool)

    def _is_lost(self, rank: int) -> bool:
        """Record a rank's worker as lost if it is."""
        worker = self.runners[rank]
        if not isinstance(worker, WorkerRunner):
            return False
        try:
            worker.check_worker()
        except InlError as error:
            self._record_failure(_Failure(rank, error))
            return True
        return False

    def _submit_to(self, rank: int, frame: IntArray, head: Header) -> None:
        try:
            self.runners[rank].submit(frame)
        except OutOfMemory as error:
            if head.kind != STEP or self._stages > 1:
                raise
            self._out_of_memory[rank, head.step] = error

    def _sample_on(self, rank: int, step: int, masks: IntArray) -> None:
        if (rank, step) not in self._out_of_memory:
            self.runners[rank].sample(step, masks)

    def _collect_from(self, rank: int, step: int) -> Reply | OutOfMemory:
        if self._stages == 1:
            return self._reply_of(rank, step)
        if (rank, step) in self._early:
            return self._early.pop((rank, step))
        return self._collect_tokens(rank, step)

    def _collect_tokens(self, rank: int, step: int) -> Reply | OutOfMemory:
        """Collect a step of a stage; others may wait for the tokens of the last one."""
        self._uncollected[rank].popleft()
        reply = self._reply_of(rank, step)
        if rank == self._first_sampling:
            self._returned.put(step, reply.tokens if isinstance(reply, Reply) else None)
        return reply

    def _reply_of(self, rank: int, step: int) -> Reply | OutOfMemory:
        if (rank, step) in self._out_of_memory:
            return self._out_of_memory.pop((rank, step))
        try:
            return self.runners[rank].collect()
        except OutOfMemory as error:
            if self._stages > 1:
                raise
            return error

    def _replies(self, call: Round) -> list[Reply]:
        """Return the replies of the ranks that sample.

        Other stages may be in a later step, which waits for masks of these tokens.
        Raises OutOfMemory if all ranks report it within OUT_OF_MEMORY_SECONDS; if only
        some do, the others may wait for them in a collective, and the group ends.
        """
        call.wait(enough=_is_out_of_memory, ranks=self._sampling)
        if not any(map(_is_out_of_memory, call.results.values())):
            return self._results(call, self._sampling)
        call.wait(OUT_OF_MEMORY_SECONDS)
        errors = {
            rank: result
            for rank, result in sorted(call.results.items())
            if _is_out_of_memory(result)
        }
        rank, error = next(iter(errors.items()))
        if len(errors) == len(self._threads):
            raise OutOfMemory(f"rank {rank} of {len(errors)}: {error}") from error
        self._record_failure(_Failure(rank, error))
        self._abort()
        return self._results(call, self._sampling)

    def _results(self, call: Round, ranks: range | None = None) -> list[Any]:
        """Wait for ranks and return their results; all by default."""
        call.wait(ranks=ranks)
        if self._failure is not None:
            self._find_losses(self._failure)
            self._raise_failure()
        ranks = range(len(self._threads)) if ranks is None else ranks
        return [call.results[rank] for rank in ranks]

    def _check_agreement(
        self, step: int, rows: int, replies: list[Reply], start: int = 0
    ) -> None:
        """Check that ranks sampled the same tokens of ``rows`` rows.

        start: the first of them, among those that sample.
        """
        first, ranks = replies[0].tokens[:rows], self._sampling[start:]
        for rank, reply in zip(ranks, replies, strict=False):
            tokens = reply.tokens[:rows]
            if reply.step == step and np.array_equal(tokens, first):
                continue
            error = ProtocolError(
                f"step {step}: sampled {tokens.tolist()} for step {reply.step}, "
                f"rank {ranks[0]} sampled {first.tolist()} for step {replies[0].step}"
            )
            self._failure = _Failure(rank, error)
            self._raise_failure()


def _is_out_of_memory(result: Any) -> bool:
    return isinstance(result, OutOfMemory)
