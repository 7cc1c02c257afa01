"""Heartbeats: what becomes of the other side is noticed, and told once."""

from __future__ import annotations

import errno
import socket

import pytest

from inl.workers import heartbeat
from inl.workers.heartbeat import Heartbeat
from waiting import until


@pytest.fixture
def ends():
    """Two connected sockets, with TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    yield near, far
    near.close()
    far.close()


def test_both_sides_hear_each_other_until_one_closes(ends, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    told = []
    near, far = (Heartbeat(each, told.append) for each in ends)
    assert near.wait(0.2) == far.wait(0.0) == ""
    far.close()
    assert near.wait(60) == "closed its connection"
    until(lambda: told)  # it is told after those who wait
    assert told == ["closed its connection"]
    near.close()


def test_a_side_that_says_nothing(ends, monkeypatch):
    near = Heartbeat(ends[0], lambda _: None)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.1)
    assert near.wait(60) == "was silent for 0.1 s"
    near.close()


def test_a_beat_comes_four_times_a_second(ends):
    near = Heartbeat(ends[0], lambda _: None)
    ends[1].settimeout(60)
    beats = b""
    while len(beats) < 3:
        beats += ends[1].recv(100)
    assert set(beats) == {0}
    near.close()


def test_a_side_that_says_it_is_stopped(ends):
    near = Heartbeat(ends[0], lambda _: None)
    far = Heartbeat(ends[1], lambda _: None, state=lambda: heartbeat.STOPPED)
    assert near.wait(60) == "was stopped by a signal"
    assert far.wait(60) == "closed its connection"


class Unreachable(socket.socket):
    def send(self, data):
        raise OSError(errno.ETIMEDOUT, "timed out")


def test_a_host_that_acknowledges_nothing(ends):
    sock = Unreachable(fileno=ends[0].detach())
    near = Heartbeat(sock, lambda _: None)
    assert near.wait(60) == "its host answered nothing for 1 s"
    near.close()


@pytest.mark.skipif(
    not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit"
)
def test_the_system_limits_the_time_of_acknowledgments(ends):
    near = Heartbeat(ends[0], lambda _: None)
    option = ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert option == 1000
    near.close()
    until(lambda: near._socket.fileno() == -1)
