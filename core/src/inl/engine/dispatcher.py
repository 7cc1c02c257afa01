"""Where answers are handed in, driven step by step, and called back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inl.engine.fair_lock import Turns
from inl.engine.step_loop import Driver
from inl.scheduling.request import Event

if TYPE_CHECKING:
    from inl.engine.core import EngineCore
    from inl.engine.request_handle import Answer


class Desk:
    """Tells answers what their requests' events are; any thread may come to it.

    One thread at a time calls the core, for one step or less.
    """

    def __init__(self, core: EngineCore) -> None:
        self.turns = Turns()
        """Who calls the core or its runner has one."""
        self._core = core
        self._open: dict[int, Answer] = {}
        self._leaving: deque[Answer] = deque()
        self._driver = Driver(self.hand_in, self.step)

    def hand_in(self, answer: Answer) -> None:
        """Queue an answer's request, unless it was dropped already.

        Raises as :meth:`~inl.engine.core.EngineCore.add`.
        """
        with self.turns:
            if not answer.completed:
                self._open[self._core.add(answer.request)] = answer

    def drive(self, answers: Sequence[Answer]) -> None:
        """Queue answers and step on a thread of its own until they end; never waits."""
        self._driver.submit(answers)

    def step(self) -> None:
        """Compute one step and tell whom it concerns."""
        with self.turns:
            self._let_go()
            events = self._core.step()
            now = time.perf_counter()
            for event in events:
                self._tell(event, now)
        self._end_dropped()

    def _tell(self, event: Event, now: float) -> None:
        answer = self._open.get(event.request)
        if answer is None or answer.reason is not None:
            return
        ended = answer.hear(event, now)
        if answer.stopped and event.reason is None:
            self._core.cancel(event.request, "stop")
        if ended:
            del self._open[event.request]

    def drop(self, answers: Sequence[Answer]) -> None:
        """Cancel answers; never waits, for iterators do it when they are collected.

        Where somebody has the turn, they end after it.
        """
        self._leaving.extend(answer for answer in answers if not answer.completed)
        self._end_dropped()

    def _end_dropped(self) -> None:
        # Asked again each time: more may come while the turn is taken and left.
        while self._leaving and self.turns.try_enter():
            try:
                self._let_go()
            finally:
                self.turns.leave()

    def _let_go(self) -> None:
        while self._leaving:
            answer = self._leaving.popleft()
            number = answer.request.id
            if answer.completed:
                continue
            if number:
                self._open.pop(number, None)
                self._core.cancel(number)
            answer.hear(Event(number, None, "cancelled"), time.perf_counter())

    def fail_all(self, error: Exception) -> None:
        """End every open answer with an error; the caller has the turn."""
        for answer in self._open.values():
            answer.fail(error)
        self._open.clear()
