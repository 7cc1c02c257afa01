"""Bounds on open requests and queued tokens, and ``Retry-After``."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from random import Random

import pytest

from depth import SEED
from inl.serve.admission import Admission, Clients, Ticket
from inl.serve.api_error import ApiError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def admission(**options):
    clock = Clock()
    defaults = {"max_running": 2, "max_queue": 3, "max_queued_tokens": 100}
    return Admission(**{**defaults, **options}, clock=clock), clock


def enter(bounds, client):
    """Admit a call of one request, and return it."""
    ticket = Ticket(client, 1)
    bounds.enter(ticket)
    return ticket


def refused(call, *args):
    with pytest.raises(ApiError) as caught:
        call(*args)
    return caught.value


def test_running_and_waiting_requests_are_bounded():
    bounds, _ = admission()
    tickets = [enter(bounds, "a") for _ in range(5)]
    assert bounds.waiting == 3
    error = refused(bounds.enter, Ticket("a", 1))
    assert (error.status, error.retry_after) == (503, 1)
    bounds.leave(tickets[0], finished=True)
    enter(bounds, "a")
    assert refused(bounds.enter, Ticket("a", 6)).status == 400


def test_retry_after_is_the_queue_over_the_drain_rate():
    bounds, clock = admission(max_queue=18)
    for _ in range(10):
        ticket = enter(bounds, "a")
        clock.now += 0.5
        bounds.leave(ticket, finished=True)
    clock.now += 0.5  # ten requests in five seconds
    for _ in range(20):
        enter(bounds, "a")
    assert bounds.drain_rate == pytest.approx(2.0)
    assert refused(bounds.enter, Ticket("a", 1)).retry_after == 10  # 19 / 2, rounded up


def test_cancelled_requests_do_not_raise_the_drain_rate():
    bounds, _ = admission()
    bounds.leave(enter(bounds, "a"), finished=False)
    assert bounds.drain_rate is None


def test_queued_tokens_are_bounded_but_for_the_first():
    bounds, _ = admission()
    first, second = enter(bounds, "a"), enter(bounds, "a")
    bounds.charge(first, 1000)
    assert refused(bounds.charge, second, 1).status == 503
    bounds.begun(first)
    bounds.charge(second, 100)
    bounds.leave(second, finished=False)
    bounds.leave(first, finished=True)
    assert bounds.queued_tokens == bounds.open == 0


def test_a_client_has_its_own_bound():
    bounds, _ = admission(max_per_client=1)
    ticket = enter(bounds, "a")
    assert refused(bounds.enter, Ticket("a", 1)).status == 429
    enter(bounds, "b")
    bounds.leave(ticket, finished=True)
    enter(bounds, "a")


def test_a_draining_server_admits_nothing():
    bounds, _ = admission()
    bounds.is_draining = True
    assert refused(bounds.enter, Ticket("a", 1)).status == 503


def test_models_share_the_bound_of_a_client():
    clients = Clients()
    first, _ = admission(max_per_client=2, clients=clients)
    second, _ = admission(max_per_client=2, clients=clients)
    tickets = [enter(first, "a"), enter(second, "a")]
    assert refused(first.enter, Ticket("a", 1)).status == 429
    second.leave(tickets[1], finished=True)
    enter(first, "a")
    assert (first.open, second.open) == (2, 0)


def test_a_call_that_is_computed_holds_no_place_but_counts_for_its_client():
    bounds, clock = admission(max_per_client=4)
    tickets = [enter(bounds, "a") for _ in range(4)]
    bounds.charge(tickets[0], 50)
    for ticket in tickets:
        bounds.computed(ticket, finished=True)
        bounds.computed(ticket, finished=True)
    assert (bounds.open, bounds.queued_tokens) == (0, 0)
    assert refused(bounds.enter, Ticket("a", 1)).status == 429
    others = [enter(bounds, "b") for _ in range(4)]
    clock.now += 2
    assert bounds.drain_rate == pytest.approx(2.0), "four, when their places were free"
    for ticket in tickets:
        bounds.leave(ticket, finished=True)
    assert (bounds.open, bounds.drain_rate) == (4, pytest.approx(2.0))
    enter(bounds, "a")
    for ticket in others:
        bounds.leave(ticket, finished=False)
    assert bounds.open == 1


def served(rates, seconds, *, places=8, queue=16, service=1.0):
    """Return the finished requests of each client, and the refused ones.

    Arrivals are random, with some rate for each client; nobody obeys ``Retry-After``.
    """
    bounds, clock = admission(max_running=places, max_queue=queue)
    draw, end = Random(SEED), clock.now + seconds
    arrivals = [(clock.now + draw.expovariate(rate), client, rate)
                for client, rate in rates.items()]  # fmt: skip
    heapq.heapify(arrivals)
    running, waiting, numbers = [], deque(), itertools.count()
    finished, refusals = Counter(), []
    while (arrival := heapq.heappop(arrivals))[0] < end:
        at, client, rate = arrival
        while running and running[0][0] <= at:
            clock.now, _, ticket = heapq.heappop(running)
            bounds.leave(ticket, finished=True)
            finished[ticket.client] += 1
            if waiting:
                entry = clock.now + service, next(numbers), waiting.popleft()
                heapq.heappush(running, entry)
        clock.now = at
        heapq.heappush(arrivals, (at + draw.expovariate(rate), client, rate))
        try:
            ticket = enter(bounds, client)
        except ApiError as error:
            refusals.append(error)
            continue
        if len(running) < places:
            heapq.heappush(running, (at + service, next(numbers), ticket))
        else:
            waiting.append(ticket)
    return finished, refusals


def test_four_times_the_capacity_is_divided_equally_between_keys():
    """8 places and requests of one second: 8 a second are the capacity."""
    seconds = 200
    finished, refusals = served({"many": 30.0, "few": 6.0, "one": 1.0}, seconds)
    assert finished.total() > 0.95 * 8 * seconds
    assert all(1 <= error.retry_after <= 60 for error in refusals)
    assert {error.status for error in refusals} == {503}
    # "one" asks for less than a share, and the others divide the rest.
    assert finished["one"] > 0.85 * seconds
    assert 0.8 < finished["few"] / finished["many"] < 1.25
    # Without a rival, a key has all places and the whole queue.
    finished, _ = served({"many": 32.0}, seconds)
    assert finished.total() > 0.95 * 8 * seconds


def test_a_key_has_all_room_until_another_one_finds_none():
    bounds, clock = admission()
    first = [enter(bounds, "a") for _ in range(5)]
    assert refused(bounds.check, "b").status == 503
    bounds.leave(first.pop(), finished=True)
    # "b" is expected again: of five places "a" may have two.
    assert refused(bounds.enter, Ticket("a", 1)).code == "queue_full"
    second = enter(bounds, "b")
    for ticket in first[:2]:
        bounds.leave(ticket, finished=True)
    first = first[2:]
    # Of three open ones two run: a third of "a" would wait.
    assert refused(bounds.enter, Ticket("a", 1)).code == "queue_full"
    bounds.leave(second, finished=True)
    # A place is free and stays so.
    bounds.leave(first.pop(), finished=True)
    first = [*first, enter(bounds, "a")]
    clock.now += 100
    first += [enter(bounds, "a") for _ in range(3)]
    assert bounds.open == 5
    for ticket in first:
        bounds.leave(ticket, finished=True)
    assert not bounds._held
