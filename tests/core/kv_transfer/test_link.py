"""Connections between engines: their bounds hold against slow and large senders."""

from __future__ import annotations

import socket
import time
from hashlib import sha256
from threading import Semaphore, Thread
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest

from inl import readiness
from inl.dtypes import HostArray
from inl.errors import ProtocolError
from inl.kv_transfer import checksums, link
from inl.kv_transfer.link import Kind, Link
from inl.kv_transfer.read_ahead import ReadAhead

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


def test_a_checksum_is_of_the_bytes_and_not_of_their_pieces(monkeypatch):
    monkeypatch.setattr(checksums, "PART", 8)
    data = bytes(range(100))
    parts = [crc32(data[at : at + 8]).to_bytes(4, "little") for at in range(0, 104, 8)]
    wanted = sha256(b"".join(parts)).digest()
    for cuts in ([], [0], [8], [3, 8, 9], [1, 50, 50, 96], [99]):
        places = zip([0, *cuts], [*cuts, 100], strict=True)
        assert checksums.checksum([data[a:b] for a, b in places]) == wanted
    found = {
        checksums.checksum([data[:at] + b"\xff" + data[at + 1 :]]) for at in range(100)
    }
    assert len(found | {wanted, checksums.checksum([data[8:], data[:8]])}) == 102


@pytest.mark.parametrize("at", [60, 5000, -1])
def test_a_wrong_byte_of_contents_is_found(sockets, monkeypatch, at):
    monkeypatch.setattr(checksums, "PART", 1000)
    cells = np.arange(5000, dtype=np.uint16).reshape(2, 2, 5, 10, 5, 5)
    parts = {"cells": HostArray(cells, "bfloat16", cells.shape)}
    near, far = socket.socketpair()
    end = time.monotonic() + 300
    with near, far:
        Link(near, KEY, end).send(Kind.SPAN, {"a": 1}, parts)
        data = bytearray(far.recv(1 << 20))
        sockets[0].sendall(data)
        data[at] ^= 1
        sockets[0].sendall(data)
    found = Link(sockets[1], KEY, end).receive().parts["cells"]
    assert np.array_equal(found.data, cells)
    with pytest.raises(ProtocolError, match="the checksum is wrong"):
        Link(sockets[1], KEY, end).receive()


class Watched(Link):
    """Says when so many messages were read."""

    def __init__(self, *given):
        super().__init__(*given)
        self.reads = Semaphore(0)

    def read_sealed(self, memory=None, max_bytes=link.MAX_BYTES):
        sealed = super().read_sealed(memory, max_bytes)
        self.reads.release()
        return sealed


def five_spans(sockets):
    """Yield contents of messages once the one after each was read, and the wanted."""
    end = time.monotonic() + 300
    near, far = Link(sockets[0], KEY, end), Watched(sockets[1], KEY, end)
    sent = [np.full((2, 2, 1, 16, 1, size), size, np.float32) for size in range(1, 6)]

    def send():
        for cells in sent:
            part = HostArray(cells, "float32", cells.shape)
            near.send(Kind.SPAN, {"size": cells.shape[-1]}, {"cells": part})
        near.send(Kind.DONE, {})

    sender = Thread(target=send)
    sender.start()
    with ReadAhead(far) as ahead:
        assert far.reads.acquire(timeout=300)
        for cells in sent:
            found = ahead.receive()
            assert far.reads.acquire(timeout=300)
            yield found.parts["cells"].data.copy(), cells
        assert ahead.receive().kind is Kind.DONE
    sender.join(300)
    assert not sender.is_alive()


def test_contents_stay_while_the_next_message_is_read(sockets):
    for found, wanted in five_spans(sockets):
        assert np.array_equal(found, wanted)


def test_memory_of_one_message_for_all_is_found(sockets, monkeypatch):
    memory, read = np.empty(1 << 16, np.uint8), Link.read_sealed
    monkeypatch.setattr(
        Link, "read_sealed", lambda own, _, most: read(own, memory, most)
    )
    with pytest.raises((ProtocolError, AssertionError)):
        assert all(np.array_equal(*each) for each in five_spans(sockets))


def test_the_end_of_reading_ahead_ends_a_waiting_thread(links):
    near, far = links
    near.send(Kind.SPAN, {"a": 1})
    with ReadAhead(far) as ahead:
        assert ahead.receive().fields == {"a": 1}
    assert not ahead._thread.is_alive()
    with ReadAhead(near) as ahead, pytest.raises(OSError, match="closed"):
        ahead.receive()
