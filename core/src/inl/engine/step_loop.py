"""Background stepping for asyncio: a thread that steps, and tasks that await it.

Tasks of any number of event loops share one engine, and so one batch. The thread runs
only while requests are open. A task queues its request and awaits a wake-up; it never
blocks on a step, also not to cancel.
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


THREAD_NAME = "inl-async"


class AsyncStepLoop:
    """Steps an engine on a daemon thread while submitted requests are open.

    add: queues a request. step: computes one step. If either raises, the affected
    handles finish with that error.
    """

    def __init__(
        self, add: Callable[[RequestHandle], None], step: Callable[[], None]
    ) -> None:
        self._add, self._step = add, step
        self._mutex = threading.Lock()
        self._submitted: deque[RequestHandle] = deque()
        self._running = False

    def submit(self, handles: Sequence[RequestHandle]) -> None:
        """Queue handles, whose ``listener`` is called on updates; never blocks."""
        with self._mutex:
            self._submitted.extend(handles)
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name=THREAD_NAME, daemon=True).start()

    def _run(self) -> None:
        open_handles: list[RequestHandle] = []
        while True:
            with self._mutex:
                new = list(self._submitted)
                self._submitted.clear()
                if not new and not open_handles:
                    self._running = False
                    return
            open_handles += new
            # Runners come from plugins: whatever they raise must reach every task.
            try:
                self._add_all(new)
                self._step()
            except Exception as error:
                for handle in open_handles:
                    handle.fail(error)
            open_handles = [each for each in open_handles if not each.completed]

    def _add_all(self, handles: Sequence[RequestHandle]) -> None:
        for handle in handles:
            try:
                self._add(handle)
            except InlError as error:
                handle.fail(error)


class Waiter:
    """Wakes one asyncio task from any thread; used as a handle's ``listener``."""

    def __init__(self) -> None:
        import asyncio  # slower to import than all of inl, and needed by few

        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Wake the task."""
        # A closed loop has no tasks to wake.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Wait until the next wake-up since the last call."""
        await self._event.wait()
        self._event.clear()


async def until_completed(handles: Sequence[RequestHandle], waiter: Waiter) -> None:
    """Wait until every request has finished."""
    while not all(handle.completed for handle in handles):
        await waiter.wait()


async def text_chunks(handle: RequestHandle, waiter: Waiter) -> AsyncIterator[str]:
    """Yield a request's text as it is generated, until it has finished."""
    while True:
        # Read before the text is taken, so that the last chunk is not lost.
        completed = handle.completed
        if chunk := handle.take():
            yield chunk
        if completed:
            return
        await waiter.wait()
