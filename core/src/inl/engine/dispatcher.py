"""Thread-safe request dispatcher: submits requests, steps the core, routes events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from inl.engine.fair_lock import FairLock
from inl.engine.step_loop import AsyncStepLoop
from inl.engine.text_piece import PieceReader, TextPiece
from inl.errors import RequestError, RunnerError
from inl.forks import on_fork
from inl.scheduling.request import Event

if TYPE_CHECKING:
    from inl.engine.batch import Batch
    from inl.engine.core import EngineCore
    from inl.engine.request_handle import Completion, RequestHandle
    from inl.kv_transfer.spans import TokenSpan


class RequestDispatcher:
    """Shares one engine core between threads and applies its events to handles.

    All methods are thread-safe. The core is called by one thread at a time, for at most
    one step. An exception, such as KeyboardInterrupt, may interrupt a call at any
    instruction: the next one gives every handle what its request has generated.

    In a forked child, requests of the parent have ended with
    :class:`~inl.errors.RunnerError`.
    """

    def __init__(self, core: EngineCore) -> None:
        self.lock = FairLock()
        """Held by the thread that calls the core or its runner."""
        self._core = core
        self._open: dict[int, RequestHandle] = {}
        self._cancelled: deque[RequestHandle] = deque()
        self.steps = 0
        """Number of steps that were computed for open requests."""
        self._is_unsettled = False
        """Whether events of the core may be missing from their handles."""
        self._is_closed = False
        self.step_loop = AsyncStepLoop(
            self.submit, self.step, self.cancel, self._has_remains
        )
        """Steps for asyncio tasks."""
        on_fork(self)

    def _has_remains(self) -> bool:
        """Whether the core has work, but no requests."""
        # With the lock: a thread that is cancelling leaves work, but does not step.
        return self.lock.run(
            lambda: self._core.has_work and not self._core.live and not self._is_closed
        )

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request, unless it is queued or cancelled already.

        Raises as :meth:`~inl.engine.core.EngineCore.add`.
        """
        self.lock.run(partial(self._submit, handle))

    def feed(self, batch: Batch) -> None:
        """Queue the next requests of a batch, as many as there is room for.

        Raises as :meth:`~inl.engine.batch.Batch.feed`.
        """
        if not batch.is_fed:
            self.lock.run(partial(batch.feed, self._submit))

    def complete(self, batch: Batch) -> list[Completion]:
        """Queue a batch and compute steps until it has finished.

        Returns the completions of its first prompts; those of the rest are left in it.
        """
        completions: list[Completion] = []
        while not batch.completed:
            # Decodes text while the device computes the next step.
            completions += batch.pop_completions()
            self.feed(batch)
            self.step()
        return completions

    def text_pieces(self, handle: RequestHandle) -> Iterator[TextPiece]:
        """Queue a request; yields an empty piece, then its text as it is generated."""
        self.submit(handle)
        yield TextPiece()
        reader = PieceReader(handle)
        while True:
            completed = handle.completed
            if (piece := reader.read()) is not None:
                yield piece
            if completed:
                break
            self.step()
        handle.completion()  # raises its error

    def _submit(self, handle: RequestHandle) -> None:
        self._settle()
        if handle.completed:
            return
        number = handle.request.id
        if not number:
            number = self._core.add(handle.request)
        self._open[number] = handle
        if number not in self._core.live:
            # An earlier call was interrupted after it had added the request.
            self._catch_up(number, handle)

    def step(self) -> None:
        """Compute one step and apply its events."""
        self.lock.run(self._step)
        self._try_drain_cancelled()

    def step_after(self, steps: int) -> None:
        """Compute a step if requests are open and :attr:`steps` has not grown since."""
        self.lock.run(partial(self._step_after, steps))
        self._try_drain_cancelled()

    def _step_after(self, steps: int) -> None:
        if self._open and self.steps == steps:
            self._step()

    def _step(self) -> None:
        self._drain_cancelled()
        if self._is_closed and not self._open:
            return  # a thread was about to compute what its last request had left
        self._is_unsettled = True
        self.steps += bool(self._open)
        self._apply(self._core.step())
        self._is_unsettled = False

    def _apply(self, events: Sequence[Event]) -> None:
        now, opened = time.perf_counter(), self._open.get
        for event in events:
            handle = opened(event.request)
            if handle is None or handle.finish_reason is not None:
                continue
            if handle.apply_event(event, now):
                if event.finish_reason is None:
                    self._core.cancel(event.request, "stop")
                del self._open[event.request]

    def _settle(self) -> None:
        """Recover if an exception has interrupted an earlier call."""
        if not self._is_unsettled:
            return
        self._core.settle()
        for number, handle in list(self._open.items()):
            self._catch_up(number, handle)
        for number in self._core.live.keys() - self._open.keys():
            self._core.cancel(number)
        self._is_unsettled = False

    def _catch_up(self, number: int, handle: RequestHandle) -> None:
        handle.catch_up()
        if handle.completed:
            self._core.cancel(number, "stop" if handle.stopped else "cancelled")
            self._open.pop(number, None)

    def cancel(self, handles: Sequence[RequestHandle]) -> None:
        """Cancel requests, after the current step if another thread is computing one.

        A handle that has finished for another reason keeps it; its request ends. Never
        blocks: iterators call it when they are garbage-collected.
        """
        is_open = self._open.__contains__
        self._cancelled.extend(
            [each for each in handles if not each.completed or is_open(each.request.id)]
        )
        self._try_drain_cancelled()

    def open_handles(self, key: str | None = None) -> list[RequestHandle]:
        """Return the handles of queued and running requests, or those of one key."""
        handles = list(self._open.values())
        return [each for each in handles if key is None or each.request.key == key]

    def take(self, handle: RequestHandle) -> list[TokenSpan]:
        """End a request here; returns the blocks of its tokens.

        The caller holds the lock. Raises :class:`~inl.errors.RequestError` for a
        request that has finished.
        """
        self._settle()
        carries = self._core.carries_state
        if carries:
            self._is_unsettled = True
            self._apply(self._core.collect_all())
            self._is_unsettled = False
        while self._core.awaits_masks and not handle.completed:
            self._step()  # copies cannot come between a step and its masks
        if handle.completed:
            raise RequestError(
                f"request {handle.request.id}: has finished, accepted: a running one"
            )
        read = self._core.read_state if carries else self._core.read_blocks
        spans = read(handle.request)
        self._cancel(handle)
        return spans

    def _try_drain_cancelled(self) -> None:
        # Checked again each time: more may arrive while the lock is held.
        while self._cancelled and self.lock.try_run(self._drain_cancelled):
            """Cancel all that have arrived meanwhile."""

    def _drain_cancelled(self) -> None:
        self._settle()
        while self._cancelled:
            # Removed last: an interrupted cancellation is repeated.
            self._cancel(self._cancelled[0])
            self._cancelled.popleft()

    def _cancel(self, handle: RequestHandle) -> None:
        number = handle.request.id
        if number:
            self._core.cancel(number)
        if not handle.completed:
            handle.apply_event(Event(number, None, "cancelled"), time.perf_counter())
        self._open.pop(number, None)

    def close(self, error: Exception) -> None:
        """End every open request with an error, and compute nothing more of them.

        The caller holds the lock.
        """
        self._is_closed = True
        for handle in self._open.values():
            handle.fail(error)
        self._open.clear()

    def after_fork_in_child(self) -> None:
        """End the parent's requests here."""
        error = RunnerError(
            "engine: the request was submitted before this process was forked; submit "
            "it again in the child"
        )
        for handle in [*self._open.values(), *self._cancelled]:
            handle.listener = None  # belongs to an event loop of the parent
            handle.fail(error)
        self._cancelled.clear()
        self._is_unsettled = True
