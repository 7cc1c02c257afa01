"""Wakes tasks of the event loop from the thread that steps the engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet


class Waiter(Protocol):
    """What is woken, such as :class:`asyncio.Event`."""

    def set(self) -> None:
        """Wake it; called by the event loop."""


class Wakeups:
    """Sets events of an event loop from another thread, many at a time.

    A step has an event for each running request, but the loop is woken once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Waiter] = deque()
        self._is_scheduled = False

    def wake(self, event: Waiter) -> None:
        """Set an event soon; callable from any thread."""
        self._events.append(event)
        if not self._is_scheduled:
            self._is_scheduled = True
            # A closed loop has no tasks to wake.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._set_all)

    def _set_all(self) -> None:
        # First, so that an event that is missed here is scheduled again.
        self._is_scheduled = False
        while self._events:
            self._events.popleft().set()


class Reader(Protocol):
    """Reads what many requests have generated."""

    def flush(self) -> None:
        """Read all of it."""


SHARE = 0.03
"""Most of the loop's time that readers take, so that the engine has the rest."""

LONGEST_WAIT = 0.05
"""Most seconds from the end of a step until it is read."""


class Steps:
    """Lets readers read after each step; a reader that is not referenced is left out.

    Steps that end while the loop is busy are read together, and so are those that end
    soon after a reading that took long: readers take :data:`SHARE` of the time at most.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._readers = WeakSet[Reader]()
        self._is_scheduled = False
        self._next = 0.0
        """Time of the loop before which nothing is read."""

    def add(self, reader: Reader) -> None:
        """Call a reader after each step. Adding it twice is allowed."""
        self._readers.add(reader)

    def wake(self) -> None:
        """Call the readers soon; callable from any thread."""
        if not self._is_scheduled:
            self._is_scheduled = True
            # A closed loop has nothing to call.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        if self._loop.time() < self._next:
            self._loop.call_at(self._next, self._call)
            return
        # First, so that a step that is missed here is scheduled again.
        self._is_scheduled = False
        began = time.thread_time()
        for reader in list(self._readers):
            reader.flush()
        taken = time.thread_time() - began
        self._next = self._loop.time() + min(taken * (1 / SHARE - 1), LONGEST_WAIT)
