"""A FIFO lock whose try_run never blocks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque

import pytest

from inl.engine.fair_lock import FairLock
from inl.errors import RequestError
from waiting import until


def is_free(lock):
    return lock.try_run(lambda: None)


def wait_for_waiters(lock, count):
    until(lambda: lock.waiters == count)


def test_the_lock_is_acquired_in_order_even_beside_a_loop():
    lock, order = FairLock(), []

    def acquire(name):
        lock.run(lambda: order.append(name))

    threads = [threading.Thread(target=acquire, args=(name,)) for name in range(5)]

    def start():
        for index, thread in enumerate(threads):
            thread.start()
            wait_for_waiters(lock, index + 1)

    lock.run(start)
    for _ in range(3):
        acquire("loop")
    for thread in threads:
        thread.join()
    assert order[:5] == [0, 1, 2, 3, 4]
    assert is_free(lock)


def test_one_thread_at_a_time_holds_the_lock():
    lock, holders, most = FairLock(), [0], [0]

    def hold():
        holders[0] += 1
        most[0] = max(most[0], holders[0])
        time.sleep(0)
        holders[0] -= 1

    def work():
        for _ in range(300):
            lock.run(hold)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_try_run_does_not_block_and_reacquiring_is_refused():
    lock = FairLock()

    def again():
        assert lock.is_mine
        assert not is_free(lock)
        with pytest.raises(RequestError, match="callback of its own step"):
            lock.run(lambda: None)
        return "done"

    assert lock.run(again) == "done"
    assert is_free(lock)
    assert not lock.is_mine


def test_attempts_of_many_threads_leave_no_work_undone():
    """A thread that fails to acquire the lock leaves its work to the one that does."""
    lock, work, done = FairLock(), deque(), []

    def drain():
        while work:
            done.append(work.popleft())

    def attempt(name):
        for count in range(300):
            work.append((name, count))
            while work and lock.try_run(drain):
                """More may have arrived."""

    threads = [threading.Thread(target=attempt, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4 * 300


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupts():
    """Raises Interrupted in the main thread whenever SIGALRM arrives."""

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_waiter_leaves_the_queue():
    lock = FairLock()
    held, done = threading.Event(), threading.Event()

    def hold():
        held.set()
        done.wait()

    holder = threading.Thread(target=lock.run, args=(hold,))
    holder.start()
    held.wait()

    def interrupt():
        wait_for_waiters(lock, 1)
        os.kill(os.getpid(), signal.SIGALRM)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(Interrupted):
        lock.run(lambda: pytest.fail("acquired while another thread holds it"))
    interrupter.join()
    assert lock.waiters == 0
    done.set()
    holder.join()
    assert is_free(lock)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_holder_passes_the_lock_on():
    lock, passed = FairLock(), []
    waiter = threading.Thread(target=lock.run, args=(lambda: passed.append(1),))

    def hold():
        waiter.start()
        wait_for_waiters(lock, 1)
        signal.raise_signal(signal.SIGALRM)
        pytest.fail("the handler raises")

    with pytest.raises(Interrupted):
        lock.run(hold)
    waiter.join(300)
    assert passed == [1]
    assert is_free(lock)
