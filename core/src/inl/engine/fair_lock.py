"""A first-in, first-out lock around the engine core and its runner."""

from __future__ import annotations

import threading
from collections import deque
from typing import Self

from inl.errors import RequestError


class FairLock:
    """A lock that is acquired in the order of the calls.

    With ``threading.Lock``, a thread that steps in a loop could reacquire the lock for
    as long as the loop runs. Not reentrant: acquiring it twice from one thread raises
    :class:`~inl.errors.RequestError`.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._waiters: deque[tuple[int, threading.Lock]] = deque()

    @property
    def waiters(self) -> int:
        """Number of threads that wait for the lock."""
        return len(self._waiters)

    def __enter__(self) -> Self:
        thread = threading.get_ident()
        if self._owner == thread:
            raise RequestError(
                "engine: called from a callback of its own step; call it afterwards"
            )
        with self._mutex:
            if self._owner is None:
                self._owner = thread
                return self
            gate = threading.Lock()
            gate.acquire()
            self._waiters.append((thread, gate))
        try:
            gate.acquire()
        except BaseException:
            self._abandon(thread, gate)
            raise
        return self

    def _abandon(self, thread: int, gate: threading.Lock) -> None:
        """Stop waiting after an interrupt; release the lock if it was just acquired."""
        with self._mutex:
            waiting = (thread, gate) in self._waiters
            if waiting:
                self._waiters.remove((thread, gate))
        if not waiting:
            self.release()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock to the thread that has waited longest."""
        with self._mutex:
            if not self._waiters:
                self._owner = None
                return
            self._owner, gate = self._waiters.popleft()
        gate.release()

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free. Never blocks, so finalizers may call it."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner = threading.get_ident()
            return True
        finally:
            self._mutex.release()
