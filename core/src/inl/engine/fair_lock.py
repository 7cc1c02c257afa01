"""A first-in, first-out lock around the engine core and its runner."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from inl.engine.cleanup import run_with_cleanup
from inl.errors import RequestError
from inl.forks import on_fork

T = TypeVar("T")


class _Ticket:
    """One acquisition; ``gate`` is released when it may have become the first."""

    __slots__ = ("began", "gate", "thread")

    def __init__(self) -> None:
        self.began = 0.0
        """``monotonic()`` time since when it holds the lock."""
        self.thread = threading.get_ident()
        self.gate = threading.Lock()
        self.gate.acquire()


class FairLock:
    """A lock that is acquired in the order of the calls.

    With ``threading.Lock``, a thread that steps in a loop could reacquire the lock for
    as long as the loop runs. Not reentrant: acquiring it twice from one thread raises
    :class:`~inl.errors.RequestError`.

    The first ticket of the queue holds the lock. Appending and removing a ticket are
    single instructions, so an exception in a thread that acquires, holds or releases
    the lock leaves nothing locked. In a forked child, only the forking thread's own
    tickets remain.
    """

    def __init__(self) -> None:
        self._queue: deque[_Ticket] = deque()
        on_fork(self)

    @property
    def waiters(self) -> int:
        """Number of threads that wait for the lock."""
        return max(len(self._queue) - 1, 0)

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        try:
            return self._queue[0].thread == threading.get_ident()
        except IndexError:
            return False

    @property
    def held_seconds(self) -> float:
        """How long one thread holds the lock already."""
        try:
            began = self._queue[0].began
        except IndexError:
            return 0.0
        return time.monotonic() - began if began else 0.0

    def run(self, work: Callable[[], T]) -> T:
        """Acquire the lock, return ``work()`` and release the lock."""
        if self.is_mine:
            raise RequestError(
                "engine: called from a callback of its own step; call it afterwards"
            )
        ticket = _Ticket()
        return run_with_cleanup(
            partial(self._run, ticket, work), partial(self._leave, ticket)
        )

    def try_run(self, work: Callable[[], object]) -> bool:
        """Call ``work`` with the lock if it is free; return whether it was called.

        Never blocks, so finalizers may call it.
        """
        while True:
            ticket = _Ticket()
            called = run_with_cleanup(
                partial(self._try_run, ticket, work), partial(self._leave, ticket)
            )
            # Not free while only another attempt was before this one: try again.
            if called or self._queue:
                return called

    def after_fork_in_child(self) -> None:
        """Drop the tickets of the parent's other threads."""
        thread = threading.get_ident()
        self._queue = deque(each for each in self._queue if each.thread == thread)

    def _run(self, ticket: _Ticket, work: Callable[[], T]) -> T:
        self._queue.append(ticket)
        while self._queue[0] is not ticket:
            ticket.gate.acquire()
        ticket.began = time.monotonic()
        return work()

    def _try_run(self, ticket: _Ticket, work: Callable[[], object]) -> bool:
        self._queue.append(ticket)
        if self._queue[0] is not ticket:
            return False
        ticket.began = time.monotonic()
        work()
        return True

    def _leave(self, ticket: _Ticket) -> None:
        """Remove a ticket, unless it was removed, and wake the first thread."""
        try:
            self._queue.remove(ticket)
        except ValueError:
            """Another call of this method was interrupted after the removal."""
        try:
            self._queue[0].gate.release()
        except (IndexError, RuntimeError):
            """No thread waits, or the first one is already awake."""
