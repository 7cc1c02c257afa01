"""The requests that wait for a slot, in order of arrival; every operation is O(1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from inl.scheduling.request import Request, Status


class WaitingQueue:
    """First come, first served; who was preempted comes before who never ran.

    A request that is finished while it waits stays inside until its turn comes, since
    removing it from the middle would take a walk over all of them.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._finished = 0

    def __len__(self) -> int:
        return len(self._requests) - self._finished

    def __iter__(self) -> Iterator[Request]:
        return (each for each in self._requests if each.status is Status.WAITING)

    def push(self, request: Request) -> None:
        """Append a new request."""
        self._requests.append(request)

    def push_back(self, request: Request) -> None:
        """Put a preempted request before all others."""
        self._requests.appendleft(request)

    def head(self) -> Request | None:
        """Return the request whose turn it is, if any."""
        while self._requests and self._requests[0].status is Status.FINISHED:
            self._requests.popleft()
            self._finished -= 1
        return self._requests[0] if self._requests else None

    def pop(self) -> Request:
        """Remove the head."""
        return self._requests.popleft()

    def forget(self) -> None:
        """Count one request inside as finished."""
        self._finished += 1
