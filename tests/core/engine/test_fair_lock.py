"""A lock that is fair, and never waits where it must not."""

from __future__ import annotations

import threading
import time

import pytest

from inl.engine.fair_lock import FairLock
from inl.errors import RequestError


def waiting(turns, count):
    for _ in range(1000):
        if len(turns._queue) == count:
            return
        time.sleep(0.001)
    raise AssertionError(f"{len(turns._queue)} wait, not {count}")


def test_turns_go_to_who_waited_longest_even_beside_a_greedy_loop():
    turns, order = FairLock(), []

    def come(name):
        with turns:
            order.append(name)

    threads = [threading.Thread(target=come, args=(name,)) for name in range(5)]
    with turns:
        for at, thread in enumerate(threads):
            thread.start()
            waiting(turns, at + 1)
    for _ in range(3):
        with turns:
            order.append("loop")
    for thread in threads:
        thread.join()
    assert order[:5] == [0, 1, 2, 3, 4]
    assert turns.try_acquire()


def test_only_one_has_a_turn():
    turns, inside, most = FairLock(), [0], [0]

    def work():
        for _ in range(300):
            with turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_trying_never_waits_and_a_second_turn_is_refused():
    turns = FairLock()
    with turns:
        assert not turns.try_acquire()
        with pytest.raises(RequestError, match="callback of its own step"), turns:
            raise AssertionError("a second turn")
    assert turns.try_acquire()
    turns.release()
    with turns:
        pass


def test_who_gives_up_waiting_leaves_the_queue_or_passes_the_turn_on():
    turns = FairLock()
    gate = threading.Lock()
    gate.acquire()
    with turns:
        turns._queue.append((-1, gate))
        turns._abandon(-1, gate)
        assert not turns._queue
        turns._queue.append((-1, gate))
    # The turn went to the waiter that is gone by now.
    assert turns._owner == -1
    turns._abandon(-1, gate)
    assert turns.try_acquire()
