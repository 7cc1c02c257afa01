"""Bounds on open requests and queued tokens, and ``Retry-After``."""

from __future__ import annotations

import pytest

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
