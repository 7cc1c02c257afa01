"""Deadlines of requests."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from inl.scheduling.request import Request


class Deadlines:
    """Finds the requests whose deadline has passed, in O(log n) for each.

    clock: returns the Unix time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._heap: list[tuple[float, int]] = []
        """Deadline and id; some requests may have finished."""

    def add(self, request: Request, number: int) -> None:
        """Watch a request with this id, if it has a deadline."""
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, number))

    def expired(self) -> list[int]:
        """Return the ids of requests whose deadline has passed, each once."""
        ids = []
        while self._heap and self._heap[0][0] <= self.clock():
            ids.append(heappop(self._heap)[1])
        return ids
