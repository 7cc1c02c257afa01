"""Background stepping for asyncio: a thread that steps, and tasks that await it.

Tasks of any number of event loops share one engine, and so one batch. The thread steps
while requests are open, and then waits a while for others: to start one takes longer
than to wake one, and whoever starts it waits for that. A task queues its request and
awaits a wake-up; it never blocks on a step, also not to cancel.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from inl.engine.batch import Batch
from inl.engine.cleanup import run_with_cleanup
from inl.engine.text_piece import PieceReader, TextPiece
from inl.errors import InlError, RunnerError
from inl.forks import on_fork

if TYPE_CHECKING:
    from inl.engine.request_handle import RequestHandle

log = logging.getLogger("inl")

THREAD_NAME = "inl-async"

IDLE_SECONDS = 10.0
"""How long the thread waits for requests before it ends."""

CHECK_SECONDS = 1.0
"""How often a waiting task checks that the thread runs."""

MOST_FAILURES = 8
"""Threads that end by an exception without a step in between, before requests fail."""


class AsyncStepLoop:
    """Steps an engine on a daemon thread while submitted requests are open.

    add: queues a request. step: computes one step. If either raises, the affected
    handles finish with that error, and ``cancel`` ends their requests; a thread that
    is ended by an exception anywhere else is replaced, and after MOST_FAILURES in a row
    all open handles finish with an error. has_remains: whether steps of
    cancelled requests, which hold their blocks, are still in flight.
    """

    def __init__(
        self,
        add: Callable[[RequestHandle], None],
        step: Callable[[], None],
        cancel: Callable[[Sequence[RequestHandle]], None],
        has_remains: Callable[[], bool],
    ) -> None:
        self._add, self._step, self._cancel = add, step, cancel
        self._has_remains = has_remains
        self._open: dict[Batch, None] = {}
        """Batches with open requests, in order of submission."""
        self._unfed: dict[Batch, None] = {}
        """Those with handles that are not queued yet."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        """Set where requests are open, for a thread that may be idle."""
        self._failures = 0
        """Threads that have ended with open requests since the last step."""
        self._progressed = 0.0
        """``monotonic()`` time of the last step, or of the request that began them."""
        self.after_step: Callable[[], None] | None = None
        """Called on the thread after each step, whether or not it has failed."""
        on_fork(self)

    def submit(self, batch: Batch) -> None:
        """Queue handles, whose ``listener`` is called on updates; never blocks."""
        if not self._open:
            self._progressed = time.monotonic()
        try:
            self._open[batch] = None
            self._unfed[batch] = None
            self.ensure_thread()
        except BaseException:
            self._forget(batch)
            raise

    @property
    def stalled_seconds(self) -> float:
        """Time without a step while requests are open."""
        return time.monotonic() - self._progressed if self._open else 0.0

    def _forget(self, batch: Batch) -> None:
        self._open.pop(batch, None)
        self._unfed.pop(batch, None)

    def after_fork_in_child(self) -> None:
        """Forget the thread and the requests, which only the parent serves."""
        self._open, self._unfed, self._thread = {}, {}, None
        self._wake = threading.Event()

    def ensure_thread(self) -> None:
        """Wake the thread if requests are open; start it if there is none."""
        thread = self._thread
        if not self._open:
            return
        if thread is None or not thread.is_alive():
            # Should two threads start, both step until no request is open.
            self._start_thread()
        else:
            self._wake.set()

    def _start_thread(self) -> None:
        # An idle thread keeps no engine in memory that nobody else refers to.
        target = partial(_run, weakref.ref(self), self._wake)
        thread = threading.Thread(target=target, name=THREAD_NAME, daemon=True)
        # Before it starts: it may end, and be forgotten, before `start` returns. Stored
        # afterwards, a thread that takes no more work would count as running.
        self._thread = thread
        thread.start()

    def pass_on(self) -> None:
        """Start another thread for batches that the one which ends leaves open."""
        self._thread = None
        if self._open:
            self._failures += 1
        if self._failures > MOST_FAILURES:
            self._give_up()
        self.ensure_thread()

    def _give_up(self) -> None:
        """Fail all requests, whatever their listeners do."""
        self._failures = 0
        error = RunnerError(
            f"engine: its thread has failed {MOST_FAILURES} times in a row; the errors "
            "before this one say why"
        )
        for batch in list(self._open):
            self._forget(batch)
            with suppress(Exception):
                self._fail(batch, error)
            with suppress(Exception):
                batch.notify()

    def step_while_open(self) -> bool:
        """Step until no request is open; return whether one has come since."""
        while self._open:
            # First: all of them are in the second list, so that errors reach them.
            unfed = list(self._unfed)
            self._step_batches(unfed, list(self._open))
            self._progressed = time.monotonic()
            self._failures = 0
            self._drain_remains()
        return bool(self._open)

    def _drain_remains(self) -> None:
        """Compute the steps of cancelled requests, unless others need the thread."""
        try:
            while not self._open and self._has_remains():
                self._step()
        # No task waits for it. The engine's next call recovers, or raises it again.
        except Exception:
            log.exception("engine: a step after its last request failed")

    def _step_batches(self, unfed: list[Batch], batches: list[Batch]) -> None:
        try:
            self._round(unfed)
        # Runners come from plugins: whatever they raise must reach every task.
        except BaseException as error:
            for batch in batches:
                self._fail(batch, error)
        for batch in batches:
            # One attribute of most batches is read, as there may be hundreds.
            last = batch.last
            if (last is None or last.finish_reason is not None) and batch.completed:
                batch.notify()
                self._forget(batch)
        if self.after_step is not None:
            self.after_step()

    def _round(self, unfed: list[Batch]) -> None:
        for batch in unfed:
            try:
                batch.feed(self._add)
            except InlError as error:
                self._fail(batch, error)
            if batch.is_fed:
                self._unfed.pop(batch, None)
        self._step()

    def _fail(self, batch: Batch, error: BaseException) -> None:
        batch.fail(error)
        self._cancel(batch.handles)


def _run(reference: weakref.ref[AsyncStepLoop], wake: threading.Event) -> None:
    """Step a loop, and wait for its requests, until it has had none for a while."""

    def work() -> None:
        while (loop := reference()) is not None:
            # First: requests that come from here on set it again.
            wake.clear()
            is_open = loop.step_while_open()
            del loop
            if not is_open and not wake.wait(IDLE_SECONDS):
                return

    def cleanup() -> None:
        if (loop := reference()) is not None:
            loop.pass_on()

    run_with_cleanup(work, cleanup)


class Waiter:
    """Wakes one asyncio task from any thread; used as a handle's ``listener``.

    check: called after each wake-up, and every CHECK_SECONDS.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        import asyncio  # slower to import than all of inl, and needed by few

        self._check = check
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Wake the task."""
        # A closed loop has no tasks to wake.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Wait until the next wake-up since the last call."""
        timer = self._loop.call_later(CHECK_SECONDS, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()
        self._event.clear()
        self._check()


async def until_completed(batch: Batch, waiter: Waiter) -> None:
    """Wait until every request has finished."""
    while not batch.completed:
        await waiter.wait()


async def text_chunks(
    handle: RequestHandle, waiter: Waiter
) -> AsyncIterator[TextPiece]:
    """Yield a request's text as it is generated, until it has finished."""
    reader = PieceReader(handle)
    while True:
        # Read before the text is taken, so that the last piece is not lost.
        completed = handle.completed
        if (piece := reader.read()) is not None:
            yield piece
        if completed:
            return
        await waiter.wait()
