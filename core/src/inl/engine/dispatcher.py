"""Thread-safe request dispatcher: submits requests, steps the core, routes events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.engine.fair_lock import FairLock
from inl.engine.step_loop import AsyncStepLoop
from inl.scheduling.request import Event

if TYPE_CHECKING:
    from inl.engine.core import EngineCore
    from inl.engine.request_handle import RequestHandle


class RequestDispatcher:
    """Shares one engine core between threads and applies its events to handles.

    All methods are thread-safe. The core is called by one thread at a time, for at most
    one step.
    """

    def __init__(self, core: EngineCore) -> None:
        self.lock = FairLock()
        """Held by the thread that calls the core or its runner."""
        self._core = core
        self._open: dict[int, RequestHandle] = {}
        self._cancelled: deque[RequestHandle] = deque()
        self._step_loop = AsyncStepLoop(self.submit, self.step)

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request, unless it is cancelled already.

        Raises as :meth:`~inl.engine.core.EngineCore.add`.
        """
        with self.lock:
            if not handle.completed:
                self._open[self._core.add(handle.request)] = handle

    def submit_async(self, handles: Sequence[RequestHandle]) -> None:
        """Queue requests and step on a background thread until they finish.

        Never blocks; errors are reported through the handles.
        """
        self._step_loop.submit(handles)

    def step(self) -> None:
        """Compute one step and apply its events."""
        with self.lock:
            self._drain_cancelled()
            events = self._core.step()
            now = time.perf_counter()
            for event in events:
                self._dispatch(event, now)
        self._try_drain_cancelled()

    def _dispatch(self, event: Event, now: float) -> None:
        handle = self._open.get(event.request)
        if handle is None or handle.finish_reason is not None:
            return
        finished = handle.apply_event(event, now)
        if handle.stopped and event.finish_reason is None:
            self._core.cancel(event.request, "stop")
        if finished:
            del self._open[event.request]

    def cancel(self, handles: Sequence[RequestHandle]) -> None:
        """Cancel requests, after the current step if another thread is computing one.

        Never blocks: iterators call it when they are garbage-collected.
        """
        self._cancelled.extend(handle for handle in handles if not handle.completed)
        self._try_drain_cancelled()

    def _try_drain_cancelled(self) -> None:
        # Checked again each time: more may arrive while the lock is held.
        while self._cancelled and self.lock.try_acquire():
            try:
                self._drain_cancelled()
            finally:
                self.lock.release()

    def _drain_cancelled(self) -> None:
        while self._cancelled:
            handle = self._cancelled.popleft()
            number = handle.request.id
            if handle.completed:
                continue
            if number:
                self._open.pop(number, None)
                self._core.cancel(number)
            handle.apply_event(Event(number, None, "cancelled"), time.perf_counter())

    def fail_all(self, error: Exception) -> None:
        """End every open request with an error; the caller holds the lock."""
        for handle in self._open.values():
            handle.fail(error)
        self._open.clear()
