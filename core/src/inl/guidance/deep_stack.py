"""Calls on a stack of a chosen size, whatever the thread of the caller has."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from inl.forks import on_fork

T = TypeVar("T")


class _Starter:
    """Starts threads; the size of their stacks is a setting of the whole process."""

    def __init__(self) -> None:
        self.after_fork_in_child()
        on_fork(self)

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()

    def start(self, thread: threading.Thread, size: int) -> None:
        with self._lock:
            before = threading.stack_size(size)
            try:
                thread.start()
            finally:
                threading.stack_size(before)


_starter = _Starter()


def call_on_stack(size: int, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, called on a thread with ``size`` bytes of stack.

    Raises what ``work`` raises. If the caller is interrupted, the call goes on.
    """
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = work()
        except BaseException as error:  # raised in the caller
            outcome["error"] = error

    thread = threading.Thread(target=run, name="inl-grammar", daemon=True)
    _starter.start(thread, size)
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    value: T = outcome["value"]
    return value
