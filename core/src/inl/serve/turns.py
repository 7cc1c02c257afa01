"""Spreads what the connections of a server ask of its event loop over many passes.

An event loop calls everything that is ready before it looks at its sockets and timers
again. A thousand clients that send, time out or leave at the same moment would be
served in one pass, during which nothing else is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

PASS_COST: Final = 16 << 10
"""What a pass does at most, in bytes: some milliseconds where chunks are small."""

CALL_COST: Final = 1 << 10
"""What each call costs beside its bytes: the head of a request, and its task."""

Work = Callable[[], int]
"""Does a part of a connection's work, and returns its bytes."""


class Turns:
    """The work of connections, in the order in which they asked. For one event loop.

    What begins or ends a request goes first, and the parts of long bodies later; each
    pass does at least one of them.
    """

    def __init__(self) -> None:
        self._urgent: deque[Work] = deque()
        self._other: deque[Work] = deque()
        self._left = PASS_COST
        self._is_due = False
        """Whether the loop will call :meth:`_begin_pass`."""

    def takes(self, size: int) -> bool:
        """Whether a part of ``size`` bytes may be worked on now; if so, count it."""
        if self._left <= 0 or self._urgent:
            return False
        self._count(size)
        return True

    def add(self, work: Work, *, is_urgent: bool = True) -> None:
        """Call ``work`` once, in one of the next passes."""
        (self._urgent if is_urgent else self._other).append(work)
        self._expect_pass()

    def _count(self, size: int) -> None:
        self._left -= size + CALL_COST
        self._expect_pass()

    def _expect_pass(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._is_due = False
        self._left = PASS_COST
        # What is added meanwhile waits: tasks that were begun here run before.
        urgent, other = len(self._urgent), len(self._other)
        if other:
            self._do(self._other)
        while urgent and self._left > 0:
            urgent -= 1
            self._do(self._urgent)
        while other > 1 and self._left > 0:
            other -= 1
            self._do(self._other)
        if self._urgent or self._other:
            self._expect_pass()

    def _do(self, queue: deque[Work]) -> None:
        try:
            self._count(queue.popleft()())
        except BaseException:
            self._expect_pass()  # of the others
            raise
