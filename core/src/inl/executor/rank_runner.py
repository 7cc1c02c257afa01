"""A tensor-parallel group: a thread of this process for each rank's runner."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from inl.errors import (
    InlError,
    OutOfMemory,
    ProtocolError,
    RunnerError,
    WeightMismatch,
    WorkerLost,
)
from inl.protocol.runner import Reply, Runner
from inl.spec.cache import Paged, Slotted
from inl.spec.message import MASKED, STEP, header
from inl.spec.tree import leaves

if TYPE_CHECKING:
    from inl.spec.message import IntArray


FULL_SECONDS = 5.0
"""How long ranks may take to find no memory where one of them has found none."""


class _Flight(NamedTuple):
    step: int
    rows: int
    """Rows in use: only their tokens must agree."""


class _Failure(NamedTuple):
    rank: int
    cause: BaseException


@final
class RankRunner(Runner):
    """Gives every frame to all ranks and answers with what all of them chose.

    ``make(rank)`` builds a rank's runner, on the rank's own thread. ``abort`` lets
    ranks that wait for another fail at once. The first failure of any rank stops the
    group: it is raised once, as :class:`~inl.errors.RunnerError` from its cause (as
    :class:`~inl.errors.WorkerLost` where a rank's process is gone), and every later
    call refuses. A step for which no rank has memory is :class:`OutOfMemory`, and the
    group goes on; where some ranks have it, it is over with that error. What ``make``
    raises of our own errors is raised as it is.
    """

    def __init__(
        self, make: Callable[[int], Runner], ranks: int, *, abort: Callable[[], None]
    ) -> None:
        if ranks < 1:
            raise RunnerError(f"ranks: found {ranks}, accepted: 1 and more")
        self._abort = abort
        self._lock = threading.Lock()
        self._failure: _Failure | None = None
        self._refusal = ""
        self._closed = False
        self._flying: deque[_Flight] = deque()
        self._masked: int | None = None
        self._full: dict[tuple[int, int], OutOfMemory] = {}
        """(rank, step) -> why a rank of this process did not begin it."""
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"inl-rank-{rank}")
            for rank in range(ranks)
        ]
        try:
            self._runners = self._wait(self._everywhere(make))
        except RunnerError as error:
            self._join()
            cause = error.__cause__
            if isinstance(cause, InlError):
                raise cause from cause.__cause__
            raise
        self.limits = self._runners[0].limits

    def submit(self, message: IntArray) -> None:
        self._check()
        found = header(message)
        if self._masked is not None:
            raise ProtocolError(
                f"step {self._masked} waits for its masks: call sample first"
            )
        if found.kind == STEP:
            if len(self._flying) >= self.limits.depth:
                raise ProtocolError(
                    f"step {found.step}: {len(self._flying)} steps are in flight, "
                    f"the limit is {self.limits.depth}"
                )
            self._masked = found.step if found.flags & MASKED else None
            self._flying.append(_Flight(found.step, found.used_rows))
        frame = message.copy()
        self._everywhere(lambda rank: self._submit(rank, frame))

    def sample(self, step: int, masks: IntArray) -> None:
        self._check()
        if self._masked is None or self._masked != step:
            raise ProtocolError(f"step {step}: no masks were announced for it")
        self._masked = None
        words = masks.copy()
        self._everywhere(lambda rank: self._choose(rank, step, words))

    def collect(self) -> Reply:
        self._check()
        if not self._flying:
            raise ProtocolError("collect: no step is in flight")
        if self._masked == self._flying[0].step:
            raise ProtocolError(
                f"step {self._masked} waits for its masks: call sample first"
            )
        flight = self._flying.popleft()
        replies = self._together(
            self._everywhere(lambda rank: self._collect(rank, flight.step))
        )
        self._agree(flight, replies)
        return replies[0]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._refusal = "the rank group is closed; make a new one"
        if self._flying or self._failure is not None:
            # A rank may wait for one that sees the refusal and never comes.
            self._abort()
        # All at once: to leave a group, a rank may wait for the others.
        closing = [
            thread.submit(runner.close)
            for thread, runner in zip(self._threads, self._runners, strict=True)
        ]
        self._join()
        for each in closing:
            each.result()

    def _join(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=True)

    def _check(self) -> None:
        if self._refusal:
            raise RunnerError(self._refusal)
        if self._failure is not None:
            self._refuse()

    def _refuse(self) -> None:
        assert self._failure is not None
        rank, cause = self._failure
        what = f"rank {rank} of {len(self._threads)} failed"
        self._refusal = f"{what} before: the group is over; make a new one"
        kinds = (WorkerLost, OutOfMemory)
        kind = next((each for each in kinds if isinstance(cause, each)), RunnerError)
        raise kind(f"{what}: {type(cause).__name__}: {cause}") from cause

    def _everywhere(self, call: Callable[[int], Any]) -> list[Future[Any]]:
        """Queue ``call(rank)`` on every rank's thread."""
        return [
            thread.submit(self._guarded, rank, call)
            for rank, thread in enumerate(self._threads)
        ]

    def _guarded(self, rank: int, call: Callable[[int], Any]) -> Any:
        if self._failure is not None or self._refusal:
            return None
        try:
            return call(rank)
        except BaseException as error:
            self._fail(_Failure(rank, error))
            self._abort()
            return None

    def _fail(self, found: _Failure) -> None:
        """Keep the first failure, or a rank that is gone: it explains the others."""
        with self._lock:
            first, lost = self._failure, isinstance(found.cause, WorkerLost)
            if first is None or (lost and not isinstance(first.cause, WorkerLost)):
                self._failure = found

    def _submit(self, rank: int, frame: IntArray) -> None:
        """Submit a frame to one rank, and keep what it says of a step's memory."""
        try:
            self._runners[rank].submit(frame)
        except OutOfMemory as error:
            found = header(frame)
            if found.kind != STEP:
                raise
            self._full[rank, found.step] = error

    def _choose(self, rank: int, step: int, masks: IntArray) -> None:
        if (rank, step) not in self._full:
            self._runners[rank].sample(step, masks)

    def _collect(self, rank: int, step: int) -> Reply | OutOfMemory:
        if (rank, step) in self._full:
            return self._full.pop((rank, step))
        try:
            reply: Reply = self._runners[rank].collect()
            return reply
        except OutOfMemory as error:
            return error

    def _together(self, futures: list[Future[Any]]) -> list[Reply]:
        """Replies of all ranks; raises ``OutOfMemory`` where none of them has begun.

        Where only some had no memory the others wait for them, or are a step ahead.
        """
        for future in as_completed(futures):
            if isinstance(future.result(), OutOfMemory):
                break
        else:
            return self._wait(futures)
        _, late = wait(futures, FULL_SECONDS)
        found = {
            rank: future.result()
            for rank, future in enumerate(futures)
            if future not in late and isinstance(future.result(), OutOfMemory)
        }
        rank, full = next(iter(found.items()))
        if len(found) == len(futures):
            raise OutOfMemory(f"rank {rank} of {len(found)}: {full}") from full
        self._fail(_Failure(rank, full))
        self._abort()
        return self._wait(futures)

    def _wait(self, futures: Iterable[Future[Any]]) -> list[Any]:
        results = [future.result() for future in futures]
        if self._failure is not None:
            self._refuse()
        return results

    def _agree(self, flight: _Flight, replies: list[Reply]) -> None:
        first = replies[0].tokens[: flight.rows]
        for rank, reply in enumerate(replies):
            tokens = reply.tokens[: flight.rows]
            if reply.step == flight.step and np.array_equal(tokens, first):
                continue
            error = ProtocolError(
                f"step {flight.step}: chose {tokens.tolist()} for step {reply.step}, "
                f"rank 0 chose {first.tolist()} for step {replies[0].step}"
            )
            self._failure = _Failure(rank, error)
            self._refuse()


def check_shares(groups: Any, state: tuple[Paged | Slotted, ...], ranks: int) -> None:
    """Refuse a number of ranks that a model cannot be cut for.

    groups: tree of :class:`~inl.weights.plan.Planned`. Rows that divide evenly are
    not enough: a head that lies across two ranks attends to nothing. Raises
    :class:`~inl.errors.WeightMismatch` naming the tensor and axis, or the cache.
    """
    for planned in leaves(groups):
        for param in planned.group.params.values():
            planned.shard(param)
    for item in state:
        if isinstance(item, Paged) and item.kv_heads % ranks:
            raise WeightMismatch(
                f"cache of layers {item.layers[0]} to {item.layers[-1]}: "
                f"{item.kv_heads} key-value heads, which {ranks} ranks cannot share "
                f"evenly; accepted: a divisor of {item.kv_heads}"
            )
