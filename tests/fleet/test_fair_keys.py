"""Keys under overload get what max-min fairness gives them, over all engines together.

Time is simulated. Admission of the server and of its engines, the router and the shares
of the engines' queues are those that serve.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from random import Random

import pytest

from depth import SEED
from inl.fleet.router import Router
from inl.scheduling.fair_shares import FairShares
from inl.serve.admission import Admission, Ticket
from inl.serve.api_error import ApiError

PLACES, QUEUE, ENGINES = 8, 16, 2
SERVICE = 1.0
"""Seconds of a request."""
CAPACITY = ENGINES * PLACES / SERVICE
TOKENS = 32


def max_min(offered, capacity):
    """Return what each key gets: all it asks for, or as much as any other one."""
    found, left = {}, capacity
    for number, key in enumerate(sorted(offered, key=offered.get)):
        found[key] = min(offered[key], left / (len(offered) - number))
        left -= found[key]
    return found


class Engine:
    """Runs requests, those of the key with the fewest tokens first."""

    def __init__(self, clock, queue):
        self.admission = Admission(
            max_running=PLACES, max_queue=queue, max_queued_tokens=1 << 30, clock=clock
        )
        self.running = 0
        self.waiting = {}
        self._shares = FairShares()

    def put(self, ticket, work):
        self.admission.enter(ticket)
        self.waiting.setdefault(ticket.client, deque()).append((ticket, work))
        self._shares.add(ticket.client)

    def starting(self):
        """Yield what may start now."""
        while self.running < PLACES and (key := self._shares.first()) is not None:
            self._shares.choose(key)
            self._shares.charge(key, TOKENS)
            queue = self.waiting[key]
            yield queue.popleft()
            self.running += 1
            if not queue:
                self._shares.remove_first()


class Fleet:
    """The front-end, and engines in simulated time; nobody obeys ``Retry-After``."""

    def __init__(self, make_admission=Admission, queue=QUEUE):
        self.now = 100.0
        clock = lambda: self.now  # noqa: E731
        self.admission = make_admission(
            max_running=ENGINES * PLACES, max_queue=queue, max_queued_tokens=1 << 30,
            clock=clock,
        )  # fmt: skip
        self.router = Router(clock=clock)
        self.engines = [Engine(clock, queue) for _ in range(ENGINES)]
        for number in range(ENGINES):
            self.router.add(number, PLACES, 1 << 16)
        self._ends = []
        self._numbers = itertools.count()
        self.answers, self.refusals = Counter(), Counter()
        self.least_retry = 1 << 30

    def submit(self, key):
        outer = Ticket(key, 1)
        try:
            self.admission.enter(outer)
        except ApiError as error:
            self.refusals[key] += 1
            self.least_retry = min(self.least_retry, error.retry_after)
            return
        refused = set()
        while (choice := self.router.choose([], TOKENS, refused)) is not None:
            number, inner = choice[0], Ticket(key, 1)
            begun = self.router.begin(number, [], TOKENS, 0)
            try:
                self.engines[number].put(inner, (outer, begun))
            except ApiError:
                self.router.end(begun)
                refused.add(number)
                continue
            self._start(number)
            return
        self.refusals[key] += 1
        self.admission.leave(outer, finished=False)

    def _start(self, number):
        for inner, (outer, begun) in self.engines[number].starting():
            self.router.record_first(begun, 0)
            entry = self.now + SERVICE, next(self._numbers), number, inner, outer, begun
            heapq.heappush(self._ends, entry)

    def until(self, at):
        while self._ends and self._ends[0][0] <= at:
            self.now, _, number, inner, outer, begun = heapq.heappop(self._ends)
            self.router.end(begun)
            self.engines[number].running -= 1
            self.engines[number].admission.leave(inner, finished=True)
            self.admission.leave(outer, finished=True)
            self.answers[outer.client] += 1
            self._start(number)
        self.now = at


def served(fleet, offered, seconds):
    """Return the answers of each key a second, of random arrivals at these rates."""
    draw, began = Random(SEED), fleet.now
    arrivals = [(began + draw.expovariate(rate), key) for key, rate in offered.items()]
    heapq.heapify(arrivals)
    while arrivals[0][0] < began + seconds:
        at, key = heapq.heappop(arrivals)
        fleet.until(at)
        fleet.submit(key)
        heapq.heappush(arrivals, (at + draw.expovariate(offered[key]), key))
    fleet.until(began + seconds)
    return {key: fleet.answers[key] / seconds for key in offered}


def offers(parts):
    """Return four times the capacity, divided so between keys."""
    return {
        f"key{at}": 4 * CAPACITY * part / sum(parts) for at, part in enumerate(parts)
    }


class NoShares(Admission):
    """Refuses whoever comes when there is no room."""

    def _share(self, client):
        return self.max_running + QUEUE


@pytest.mark.parametrize("parts", [(8, 1), (1, 1), (2, 1), (13, 2, 1), (30, 1, 1, 1)])
def test_four_times_the_capacity_is_divided_as_fairness_says(parts):
    """Of parts 8 and 1 the small key asks for 0.44 of the capacity, so gets all of it.

    A share of places is a share of arrivals in bursts, so that some of them are lost.
    """
    fleet = Fleet()
    found = served(fleet, offers(parts), 300)
    wanted = max_min(offers(parts), CAPACITY)
    assert sum(found.values()) > 0.97 * CAPACITY
    assert fleet.least_retry >= 1
    for key in wanted:
        assert found[key] > 0.9 * wanted[key], (found, wanted)


def test_a_server_without_shares_would_be_unfair():
    """Most of what the test above shows is the admission's: the check can fail."""
    found = served(Fleet(make_admission=NoShares), offers((8, 1)), 300)
    assert found["key1"] < 0.6 * max_min(offers((8, 1)), CAPACITY)["key1"]


def test_a_key_that_has_found_no_room_keeps_its_share_while_it_comes_again():
    """With room for its bursts, next to nothing of a small key is refused."""
    fleet = Fleet(queue=64)
    found = served(fleet, offers((8, 1)), 300)
    assert found["key1"] > 0.95 * max_min(offers((8, 1)), CAPACITY)["key1"]
    assert fleet.refusals["key1"] < 0.01 * fleet.answers["key1"]
    # Without rivals it has all room again.
    fleet.until(fleet.now + 100)
    refused = fleet.refusals.total()
    for _ in range(ENGINES * PLACES + 64):
        fleet.submit("key0")
    assert fleet.refusals.total() == refused
