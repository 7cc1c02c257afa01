"""Whose turn it is to call a runner: one thread at a time, in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from typing import Self

from inl.errors import RequestError


class FairLock:
    """A lock that goes to whoever has waited longest.

    An ordinary lock may be taken again at once by a thread that steps in a loop, for
    as long as the loop runs. It is not reentrant: a second turn of the thread that has
    one raises :class:`~inl.errors.RequestError`.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._queue: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> Self:
        mine = threading.get_ident()
        if self._owner == mine:
            raise RequestError(
                "engine: was called from a callback of its own step; call it later"
            )
        with self._mutex:
            if self._owner is None:
                self._owner = mine
                return self
            gate = threading.Lock()
            gate.acquire()
            self._queue.append((mine, gate))
        try:
            gate.acquire()
        except BaseException:
            self._abandon(mine, gate)
            raise
        return self

    def _abandon(self, mine: int, gate: threading.Lock) -> None:
        """Leave the queue after an interrupt, or pass on a turn that came meanwhile."""
        with self._mutex:
            waits = (mine, gate) in self._queue
            if waits:
                self._queue.remove((mine, gate))
        if not waits:
            self.release()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """End the turn."""
        with self._mutex:
            if not self._queue:
                self._owner = None
                return
            self._owner, gate = self._queue.popleft()
        gate.release()

    def try_acquire(self) -> bool:
        """Take the turn if nobody has it; never waits, so finalizers may ask."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner = threading.get_ident()
            return True
        finally:
            self._mutex.release()
