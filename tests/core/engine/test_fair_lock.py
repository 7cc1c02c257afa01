"""A FIFO lock whose try_acquire never blocks."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from inl.engine.fair_lock import FairLock
from inl.errors import RequestError


def wait_for_waiters(lock, count):
    for _ in range(5000):
        if lock.waiters == count:
            return
        time.sleep(0.001)
    raise AssertionError(f"{lock.waiters} threads wait, not {count}")


def test_the_lock_is_acquired_in_order_even_beside_a_loop():
    lock, order = FairLock(), []

    def acquire(name):
        with lock:
            order.append(name)

    threads = [threading.Thread(target=acquire, args=(name,)) for name in range(5)]
    with lock:
        for index, thread in enumerate(threads):
            thread.start()
            wait_for_waiters(lock, index + 1)
    for _ in range(3):
        with lock:
            order.append("loop")
    for thread in threads:
        thread.join()
    assert order[:5] == [0, 1, 2, 3, 4]
    assert lock.try_acquire()


def test_one_thread_at_a_time_holds_the_lock():
    lock, holders, most = FairLock(), [0], [0]

    def work():
        for _ in range(300):
            with lock:
                holders[0] += 1
                most[0] = max(most[0], holders[0])
                time.sleep(0)
                holders[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_try_acquire_does_not_block_and_reacquiring_is_refused():
    lock = FairLock()
    with lock:
        assert not lock.try_acquire()
        with pytest.raises(RequestError, match="callback of its own step"), lock:
            raise AssertionError("acquired twice")
    assert lock.try_acquire()
    lock.release()
    with lock:
        pass


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupts():
    """Raises Interrupted in the main thread whenever SIGALRM arrives."""

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_waiter_leaves_the_queue():
    lock = FairLock()
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(Interrupted), lock:
        raise AssertionError("acquired while another thread holds it")
    assert lock.waiters == 0
    done.set()
    holder.join()
    assert lock.try_acquire()


def test_a_waiter_interrupted_after_the_release_passes_the_lock_on():
    lock = FairLock()
    gate = threading.Lock()
    gate.acquire()
    with lock:
        lock._waiters.append((-1, gate))
    # Released to the waiter, which an interrupt keeps from taking it.
    assert not lock.try_acquire()
    lock._abandon(-1, gate)
    assert lock.try_acquire()
