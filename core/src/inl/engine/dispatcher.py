"""Where answers are handed in, driven step by step, and called back."""

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
    """Tells answers what their requests' events are; any thread may come to it.

    One thread at a time calls the core, for one step or less.
    """

    def __init__(self, core: EngineCore) -> None:
        self.lock = FairLock()
        """Who calls the core or its runner has one."""
        self._core = core
        self._open: dict[int, RequestHandle] = {}
        self._cancelled: deque[RequestHandle] = deque()
        self._step_loop = AsyncStepLoop(self.submit, self.step)

    def submit(self, answer: RequestHandle) -> None:
        """Queue an answer's request, unless it was dropped already.

        Raises as :meth:`~inl.engine.core.EngineCore.add`.
        """
        with self.lock:
            if not answer.completed:
                self._open[self._core.add(answer.request)] = answer

    def submit_async(self, answers: Sequence[RequestHandle]) -> None:
        """Queue answers and step on a thread of its own until they end; never waits."""
        self._step_loop.submit(answers)

    def step(self) -> None:
        """Compute one step and tell whom it concerns."""
        with self.lock:
            self._drain_cancelled()
            events = self._core.step()
            now = time.perf_counter()
            for event in events:
                self._dispatch(event, now)
        self._try_drain_cancelled()

    def _dispatch(self, event: Event, now: float) -> None:
        answer = self._open.get(event.request)
        if answer is None or answer.reason is not None:
            return
        ended = answer.apply_event(event, now)
        if answer.stopped and event.reason is None:
            self._core.cancel(event.request, "stop")
        if ended:
            del self._open[event.request]

    def cancel(self, answers: Sequence[RequestHandle]) -> None:
        """Cancel answers; never waits, for iterators do it when they are collected.

        Where somebody has the turn, they end after it.
        """
        self._cancelled.extend(answer for answer in answers if not answer.completed)
        self._try_drain_cancelled()

    def _try_drain_cancelled(self) -> None:
        # Asked again each time: more may come while the turn is taken and left.
        while self._cancelled and self.lock.try_acquire():
            try:
                self._drain_cancelled()
            finally:
                self.lock.release()

    def _drain_cancelled(self) -> None:
        while self._cancelled:
            answer = self._cancelled.popleft()
            number = answer.request.id
            if answer.completed:
                continue
            if number:
                self._open.pop(number, None)
                self._core.cancel(number)
            answer.apply_event(Event(number, None, "cancelled"), time.perf_counter())

    def fail_all(self, error: Exception) -> None:
        """End every open answer with an error; the caller has the turn."""
        for answer in self._open.values():
            answer.fail(error)
        self._open.clear()
