"""Queue of requests that wait for a slot, by key and priority."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush

from inl.scheduling.fair_shares import FairShares
from inl.scheduling.request import Request, Status

HEAD_START = 100
"""Later requests that a request overtakes per level of priority, at most."""

YIELDS = 1024
"""Tokens of a prompt for which one later request may overtake it."""


class WaitingQueue:
    """Requests in the order in which they start.

    Preempted requests and further samples of a prompt come first. Then the keys of the
    requests take turns, see :class:`~inl.scheduling.fair_shares.FairShares`. Requests
    of one key start by priority, and in order of arrival among equals. One level of
    priority is worth a head start of ``HEAD_START`` arrivals, so that a request is
    overtaken by a bounded number of later ones.

    A request that finishes while it waits stays in the queue until it is first, because
    removing it from the middle would be O(n).
    """

    def __init__(self) -> None:
        self.shares = FairShares()
        self.clear()

    def clear(self) -> None:
        """Remove all requests."""
        self._first: deque[Request] = deque()
        self._by_key: dict[str, list[tuple[int, int, int, Request]]] = {}
        self.shares.clear_waiting()
        self._count = 0
        self.tokens = 0
        """Tokens of the prompts that wait."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        queued = [entry[-1] for heap in self._by_key.values() for entry in sorted(heap)]
        waiting = (each for each in (*self._first, *queued) if _waits(each))
        return iter(list(waiting))

    def push(self, request: Request, arrival: int) -> None:
        """Add a request; ``arrival`` is its id."""
        self._add(request)
        yields = request.prompt_tokens // YIELDS
        request.order = arrival - HEAD_START * request.priority + yields
        entry = (request.order, yields, arrival, request)
        heappush(self._by_key.setdefault(request.key, []), entry)
        self.shares.add(request.key)

    def push_front(self, request: Request) -> None:
        """Insert a preempted request before all others."""
        self._add(request)
        self._first.appendleft(request)

    def hold(self, request: Request) -> None:
        """Count a request that waits for another one, before :meth:`push_held`."""
        self._add(request)

    def push_held(self, request: Request) -> None:
        """Insert a request that was held behind those that come first."""
        self._first.append(request)

    def head(self) -> Request | None:
        """Return the next request, or ``None`` if the queue is empty."""
        while self._first and not _waits(self._first[0]):
            self._first.popleft()
        if self._first:
            return self._first[0]
        while (key := self.shares.first()) is not None:
            heap = self._by_key[key]
            while heap and not _waits(heap[0][-1]):
                heappop(heap)
            if heap:
                return heap[0][-1]
            del self._by_key[key]
            self.shares.remove_first()
        return None

    def pop(self) -> Request:
        """Remove and return the request that :meth:`head` returns."""
        request = self.head()
        assert request is not None, "the caller has seen the head"
        if self._first:
            self._first.popleft()
        else:
            self.shares.choose(request.key)
            heappop(self._by_key[request.key])
        self.discard(request)
        return request

    def discard(self, request: Request) -> None:
        """Count a queued request as gone; its status marks which one."""
        self._count -= 1
        self.tokens -= request.prompt_tokens

    def _add(self, request: Request) -> None:
        self._count += 1
        self.tokens += request.prompt_tokens


def _waits(request: Request) -> bool:
    return request.status is Status.WAITING
