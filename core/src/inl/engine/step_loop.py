"""What asyncio needs of an engine: a thread that steps, and tasks that wait for it.

Tasks of any number of event loops share one engine, and so one batch. The thread lives
only while one of them waits. All that a task does itself is to queue its request and to
be woken; it never waits for a step, not even to be cancelled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from inl.errors import InlError

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle


class AsyncStepLoop:
    """Steps an engine while answers that were given to it are open.

    add: queues an answer's request. step: one step of the engine; both may raise, and
    then the answers concerned end with that error.
    """

    def __init__(
        self, add: Callable[[RequestHandle], None], step: Callable[[], None]
    ) -> None:
        self._add, self._step = add, step
        self._mutex = threading.Lock()
        self._arriving: deque[RequestHandle] = deque()
        self._runs = False

    def submit(self, answers: Sequence[RequestHandle]) -> None:
        """Queue answers, to be told of by their ``listener``; never waits."""
        with self._mutex:
            self._arriving.extend(answers)
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._run, name="inl-async", daemon=True).start()

    def _run(self) -> None:
        open_answers: list[RequestHandle] = []
        while True:
            with self._mutex:
                arrived = list(self._arriving)
                self._arriving.clear()
                if not arrived and not open_answers:
                    self._runs = False
                    return
            open_answers += arrived
            # A runner is anyone's code: whatever it raises must reach every task.
            try:
                self._add_all(arrived)
                self._step()
            except Exception as error:
                for answer in open_answers:
                    answer.fail(error)
            open_answers = [each for each in open_answers if not each.completed]

    def _add_all(self, answers: Sequence[RequestHandle]) -> None:
        for answer in answers:
            try:
                self._add(answer)
            except InlError as error:
                answer.fail(error)


class Waiter:
    """Wakes one task of one event loop, from any thread."""

    def __init__(self) -> None:
        import asyncio  # takes longer to import than all of INL, and few need it

        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Wake the task."""
        # A loop that is closed has no tasks left to wake.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Wait until woken, since the last time."""
        await self._event.wait()
        self._event.clear()


async def until_completed(answers: Sequence[RequestHandle], waiter: Waiter) -> None:
    """Wait until every answer has ended."""
    while not all(answer.completed for answer in answers):
        await waiter.wait()


async def pieces(answer: RequestHandle, waiter: Waiter) -> AsyncIterator[str]:
    """Yield an answer's text as it becomes certain, until it has ended."""
    while True:
        # Asked before the text is taken, so that the last of it is never left.
        completed = answer.completed
        if piece := answer.take():
            yield piece
        if completed:
            return
        await waiter.wait()
