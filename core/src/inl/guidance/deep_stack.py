"""Calls on a thread with a stack of a chosen size, whatever the caller's thread has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inl.forks import on_fork

T = TypeVar("T")


class DeepStack:
    """A thread with ``size`` bytes of stack, which starts with the first call.

    One thread for all calls: the C library keeps freed memory for each thread.
    Thread-safe.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.after_fork_in_child()
        on_fork(self)

    def after_fork_in_child(self) -> None:
        """Forget the parent's thread."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "inl-grammar")

    def call(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, or raise what it raises.

        If the caller is interrupted, the call goes on.
        """
        with self._lock:
            # A setting of the whole process, read when a thread starts.
            before = threading.stack_size(self._size)
            try:
                future = self._thread.submit(work)
            finally:
                threading.stack_size(before)
        return future.result()
