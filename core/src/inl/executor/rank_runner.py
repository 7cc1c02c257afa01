"""A tensor-parallel group: one runner per rank, each called from its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from inl.errors import InlError, OutOfMemory, ProtocolError, RunnerError, WorkerLost
from inl.protocol.runner import PipelinedRunner, Reply, Runner, StepInFlight
from inl.spec.message import STEP, Header

if TYPE_CHECKING:
    from inl.spec.message import IntArray


OUT_OF_MEMORY_SECONDS = 5.0
"""Time for all ranks to run out of memory in a step, once one of them has."""


class _Failure(NamedTuple):
    rank: int
    cause: BaseException


@final
class RankRunner(PipelinedRunner):
    """Sends every frame to all ranks and checks that they sample the same tokens.

    make: builds a rank's runner, called as ``make(rank)`` on that rank's thread; an
    InlError that it raises is raised here as it is. abort: makes ranks that wait for
    other ranks fail at once.

    The first failure of a rank ends the group. It is raised once, from its cause, as
    :class:`~inl.errors.RunnerError` (:class:`~inl.errors.WorkerLost` if the rank's
    process is gone); later calls raise RunnerError. If all ranks run out of memory in
    a step, ``collect`` raises :class:`~inl.errors.OutOfMemory` for that step alone; if
    only some do, the group ends with that error.
    """

    def __init__(
        self, make: Callable[[int], Runner], ranks: int, *, abort: Callable[[], None]
    ) -> None:
        super().__init__()
        if ranks < 1:
            raise RunnerError(f"ranks: found {ranks}, accepted: 1 and more")
        self._abort = abort
        self._lock = threading.Lock()
        self._failure: _Failure | None = None
        self._refusal = ""
        """Message of the error that every call raises, once the failure was raised."""
        self._out_of_memory: dict[tuple[int, int], OutOfMemory] = {}
        """(rank, step) -> error of a rank that did not begin the step."""
        self._last_call: tuple[int, Callable[[int], Any]] = 0, lambda _rank: None
        """Number and function of the newest call on all ranks."""
        self._done = [0] * ranks
        """Number of each rank's newest call."""
        self._closing: list[Future[None]] = []
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"inl-rank-{rank}")
            for rank in range(ranks)
        ]
        try:
            self.runners: list[Runner] = self._results(self._on_all_ranks(make))
        except RunnerError as error:
            self._join()
            cause = error.__cause__
            if isinstance(cause, InlError):
                raise cause from cause.__cause__
            raise
        self.limits = self.runners[0].limits

    def _submit_frame(self, message: IntArray, head: Header) -> None:
        frame = message.copy()
        self._on_all_ranks(lambda rank: self._submit_to(rank, frame, head))

    def _sample(self, flight: StepInFlight, masks: IntArray) -> None:
        step, words = flight.head.step, masks.copy()
        self._on_all_ranks(lambda rank: self._sample_on(rank, step, words))

    def _collect(self, flight: StepInFlight) -> Reply:
        step = flight.head.step
        # An interrupted call has left the ranks' pending replies.
        if flight.work is None:
            flight.work = self._on_all_ranks(lambda r: self._collect_from(r, step))
        replies = self._replies(flight.work)
        self._check_agreement(flight.head, replies)
        return replies[0]

    def _reset(self) -> None:
        # An exception may have kept the newest call from some of the ranks.
        self._send_to_ranks(*self._last_call)
        self._results(self._on_all_ranks(lambda rank: self.runners[rank].reset()))
        self._out_of_memory.clear()

    def _close(self) -> None:
        if self._in_flight or self._failure is not None:
            # A rank may wait for another one that will not reach the collective.
            self._abort()
        # In parallel: leaving a process group may wait for the other ranks.
        for rank in range(len(self._closing), len(self.runners)):
            close = self.runners[rank].close
            self._closing.append(self._threads[rank].submit(close))
        self._join()
        for each in self._closing:
            each.result()

    def _join(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True)

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

    def _on_all_ranks(self, call: Callable[[int], Any]) -> list[Future[Any]]:
        """Queue ``call(rank)`` on every rank's thread."""
        self._last_call = self._last_call[0] + 1, call
        return self._send_to_ranks(*self._last_call)

    def _send_to_ranks(
        self, number: int, call: Callable[[int], Any]
    ) -> list[Future[Any]]:
        """Queue a numbered call; ranks that have it already skip it."""
        return [
            thread.submit(self._guarded, rank, number, call)
            for rank, thread in enumerate(self._threads)
        ]

    def _guarded(self, rank: int, number: int, call: Callable[[int], Any]) -> Any:
        if self._failure is not None or self._closed or number <= self._done[rank]:
            return None
        self._done[rank] = number
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

    def _submit_to(self, rank: int, frame: IntArray, head: Header) -> None:
        try:
            self.runners[rank].submit(frame)
        except OutOfMemory as error:
            if head.kind != STEP:
                raise
            self._out_of_memory[rank, head.step] = error

    def _sample_on(self, rank: int, step: int, masks: IntArray) -> None:
        if (rank, step) not in self._out_of_memory:
            self.runners[rank].sample(step, masks)

    def _collect_from(self, rank: int, step: int) -> Reply | OutOfMemory:
        if (rank, step) in self._out_of_memory:
            return self._out_of_memory.pop((rank, step))
        try:
            return self.runners[rank].collect()
        except OutOfMemory as error:
            return error

    def _replies(self, futures: list[Future[Any]]) -> list[Reply]:
        """Return the replies of all ranks.

        Raises OutOfMemory if all ranks report it within OUT_OF_MEMORY_SECONDS; if only
        some do, the others may wait for them in a collective, and the group ends.
        """
        for future in as_completed(futures):
            if isinstance(future.result(), OutOfMemory):
                break
        else:
            return self._results(futures)
        _, late = wait(futures, OUT_OF_MEMORY_SECONDS)
        errors = {
            rank: future.result()
            for rank, future in enumerate(futures)
            if future not in late and isinstance(future.result(), OutOfMemory)
        }
        rank, error = next(iter(errors.items()))
        if len(errors) == len(futures):
            raise OutOfMemory(f"rank {rank} of {len(errors)}: {error}") from error
        self._record_failure(_Failure(rank, error))
        self._abort()
        return self._results(futures)

    def _results(self, futures: Iterable[Future[Any]]) -> list[Any]:
        results = [future.result() for future in futures]
        if self._failure is not None:
            self._raise_failure()
        return results

    def _check_agreement(self, head: Header, replies: list[Reply]) -> None:
        first = replies[0].tokens[: head.used_rows]
        for rank, reply in enumerate(replies):
            tokens = reply.tokens[: head.used_rows]
            if reply.step == head.step and np.array_equal(tokens, first):
                continue
            error = ProtocolError(
                f"step {head.step}: sampled {tokens.tolist()} for step {reply.step}, "
                f"rank 0 sampled {first.tolist()} for step {replies[0].step}"
            )
            self._failure = _Failure(rank, error)
            self._raise_failure()
