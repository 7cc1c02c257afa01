"""FIFO queue of requests that wait for a slot; every operation is O(1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from inl.scheduling.request import Request, Status


class WaitingQueue:
    """Requests in order of arrival, preempted ones first.

    A request that finishes while it waits stays in the queue until it reaches the
    head, because removing it from the middle would be O(n).
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all requests."""
        self._requests: deque[Request] = deque()
        self._finished = 0
        self.tokens = 0
        """Tokens of the prompts that wait."""

    def __len__(self) -> int:
        return len(self._requests) - self._finished

    def __iter__(self) -> Iterator[Request]:
        return (each for each in self._requests if each.status is Status.WAITING)

    def push(self, request: Request) -> None:
        """Append a new request."""
        self._requests.append(request)
        self.tokens += request.prompt_tokens

    def push_front(self, request: Request) -> None:
        """Insert a preempted request before all others."""
        self._requests.appendleft(request)
        self.tokens += request.prompt_tokens

    def head(self) -> Request | None:
        """Return the next request, or ``None`` if the queue is empty."""
        while self._requests and self._requests[0].status is Status.FINISHED:
            self._requests.popleft()
            self._finished -= 1
        return self._requests[0] if self._requests else None

    def pop(self) -> Request:
        """Remove and return the request that :meth:`head` returned."""
        request = self._requests.popleft()
        self.tokens -= request.prompt_tokens
        return request

    def discard(self, request: Request) -> None:
        """Count a queued request as finished; its status marks which one."""
        self._finished += 1
        self.tokens -= request.prompt_tokens
