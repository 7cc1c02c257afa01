"""Wakes tasks of the event loop from the thread that steps the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Protocol


class Signal(Protocol):
    """What is set on the event loop, such as an :class:`asyncio.Event`."""

    def set(self) -> None:
        """Record that there is news."""


class Wakeups:
    """Sets events of an event loop from another thread, many at a time.

    A step has an event for each running request, but the loop is woken once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Signal] = deque()
        self._is_scheduled = False

    def wake(self, event: Signal) -> None:
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
