"""Connections between engines: their bounds hold against slow and large senders."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest

from inl import readiness
from inl.errors import ProtocolError
from inl.kv_transfer import link
from inl.kv_transfer.link import Kind, Link

KEY = bytes(32)


@pytest.fixture
def sockets():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.fixture
def links(sockets):
    end = time.monotonic() + 300
    return tuple(Link(each, KEY, end) for each in sockets)


@pytest.fixture
def many_descriptors():
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_a_descriptor_above_that_of_select_is_watched(sockets):
    fcntl = pytest.importorskip("fcntl")
    number = fcntl.fcntl(sockets[0], fcntl.F_DUPFD_CLOEXEC, 1024)
    with socket.socket(fileno=number) as high:
        watched = Link(high, KEY, time.monotonic() + 300)
        assert not watched.is_closed(0.0)
        sockets[1].close()
        assert watched.is_closed(300.0)


def test_a_message_longer_than_its_receiver_accepts_is_refused(links):
    near, far = links
    near.send(Kind.ASK, {"prompt": [1] * 100})
    with pytest.raises(ProtocolError, match="accepts kinds 1 to 6 of at most 64"):
        far.receive(64)


def test_a_message_is_sent_in_parts_of_bounded_time(links, monkeypatch):
    """A reader so slow that each part is in time does not extend the whole."""
    near, _ = links
    now = iter(range(0, 10_000, 100))
    monkeypatch.setattr(link, "CHUNK", 8)
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr(link, "time", clock)
    near.extend(1000.0)
    with pytest.raises(TimeoutError, match="expired"):
        near.send(Kind.ASK, {"prompt": [1] * 100})


class Dribble:
    """A socket that receives one byte at a time."""

    def settimeout(self, seconds):
        assert seconds > 0

    def recv(self, count):
        return b"x"


def test_a_sender_of_single_bytes_has_no_more_time_than_another(monkeypatch):
    now = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr(readiness, "time", clock)
    with pytest.raises(TimeoutError, match="received 5 of 38 bytes"):
        readiness.receive_exactly(Dribble(), 38, 5.0)


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [1]])
def test_messages_that_are_reordered_repeated_or_lost_are_found(sockets, order):
    """Each is a right one by itself."""
    end = time.monotonic() + 300
    near, far = sockets
    sender = Link(near, KEY, end)
    sent = []
    for number in range(2):
        sender.send(Kind.DONE, {"ticket": str(number)})
        sent.append(far.recv(1 << 16))
    third, fourth = socket.socketpair()
    with third, fourth:
        for number in order:
            third.sendall(sent[number])
        receiver = Link(fourth, KEY, end)
        with pytest.raises(ProtocolError, match="the checksum is wrong"):
            [receiver.receive() for _ in order]
