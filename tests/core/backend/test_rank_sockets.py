"""Ranks over sockets: joining, strangers, lost ranks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from inl.backend import rank_sockets
from inl.backend.collectives import Rank
from inl.backend.peer_collectives import PeerCollectives
from inl.backend.rank_sockets import (
    GREETING,
    NONCE_BYTES,
    SocketLink,
    reserve_address,
    split_address,
)
from inl.errors import RunnerError


@pytest.fixture
def joined():
    """Make the links of all ranks of a group."""
    made = []

    def join(count, *, before=lambda _address: None):
        address, reserved = reserve_address()
        ranks = [Rank(n, count, address, 300.0, secret="a" * 64) for n in range(count)]
        with reserved, ThreadPoolExecutor(count) as pool:
            first = pool.submit(SocketLink, ranks[0])
            before(address)
            made.extend([*pool.map(SocketLink, ranks[1:])])
            made.insert(0, first.result())
        return made

    yield join
    for link in made:
        link.close()


@pytest.mark.parametrize("count", [2, 5])
def test_messages_arrive_in_order_and_as_they_were(joined, count):
    links = joined(count)
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3).T, np.zeros((0, 4)),
        np.array(7), np.arange(5, dtype=np.int8)[::2], np.array([True, False]),
    ]  # fmt: skip
    for source in range(count):
        for target in range(count):
            if source == target:
                continue
            sent = [x if x.dtype == bool else x + x.dtype.type(source) for x in arrays]
            for x in sent:
                links[source].send(x, target)
            for want in sent:
                found = links[target].recv(source)
                assert (found.dtype, found.shape) == (want.dtype, want.shape)
                np.testing.assert_array_equal(found, want)


def test_large_messages_of_all_ranks_at_once_do_not_block(joined):
    count, size = 4, 1 << 22
    ranks = [Rank(n, count) for n in range(count)]
    groups = map(PeerCollectives, ranks, joined(count))

    def total(group):
        mine = np.full(size, 1.0 + group.index("tensor"), np.float32)
        return group.all_reduce(mine, "tensor")

    with ThreadPoolExecutor(count) as pool:
        for found in pool.map(total, groups):
            assert (found == 10).all()


def reach(address):
    """Connect once somebody listens."""
    while True:
        try:
            return socket.create_connection(split_address(address), 30)
        except ConnectionRefusedError:
            continue


def test_who_does_not_know_the_secret_is_left_out(joined):
    def intrude(address):
        greeting = GREETING.pack(1, 0, b"n" * NONCE_BYTES, b"b" * 32)
        for data in (greeting, b"GET / HTTP/1.1\r\n\r\n"):
            with reach(address) as stranger, stranger.makefile("rb") as said:
                stranger.sendall(data.ljust(GREETING.size, b"\0"))
                assert len(said.read()) == NONCE_BYTES

    links = joined(2, before=intrude)
    links[1].send(np.ones(2), 0)
    assert links[0].recv(1).tolist() == [1, 1]


def test_who_sends_single_bytes_has_no_more_time_than_another(joined, monkeypatch):
    """Each byte is in time; all together are not."""
    monkeypatch.setattr(rank_sockets, "GREETING_SECONDS", 0.3)
    sent = []

    def dribble(address):
        with reach(address) as stranger, suppress(OSError):
            stranger.settimeout(0.1)
            while len(sent) < GREETING.size:
                stranger.sendall(b"x")
                sent.append(b"x")
                with suppress(TimeoutError):
                    while stranger.recv(64):
                        """The nonce, and then nothing until it is closed."""
                    break
        # The other rank has as long as it needs.
        monkeypatch.setattr(rank_sockets, "GREETING_SECONDS", 300)

    links = joined(2, before=dribble)
    links[1].send(np.ones(2), 0)
    assert links[0].recv(1).tolist() == [1, 1]
    assert len(sent) < GREETING.size


def test_a_listener_that_does_not_know_the_secret_learns_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def pretend():
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as said:
                connection.sendall(b"n" * NONCE_BYTES)
                greeting = said.read(GREETING.size)
                connection.sendall(b"p" * 32)
                return greeting + said.read()

        with ThreadPoolExecutor(1) as pool:
            pretending = pool.submit(pretend)
            with pytest.raises(RunnerError, match="does not know the secret"):
                SocketLink(Rank(1, 2, address, 300.0, secret="a" * 64))
            assert b"aaaa" not in pretending.result()


def test_what_a_rank_has_sent_arrives_after_it_has_left(joined, monkeypatch):
    monkeypatch.setattr(rank_sockets, "CLOSE_SECONDS", 300.0)
    links = joined(2)
    for number in range(20):
        links[0].send(np.full(1 << 16, number), 1)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(links[0].close)
        for number in range(20):
            assert (links[1].recv(0) == number).all()
        closing.result()
    with pytest.raises(RunnerError, match="rank 1: lost rank 0"):
        links[1].recv(0)


def test_a_rank_that_ends_is_named(joined):
    links = joined(3)
    links[2].close()
    with pytest.raises(RunnerError, match="rank 0: lost rank 2: "):
        links[0].recv(2)

    def fill():
        while True:
            links[1].send(np.zeros(1 << 16), 2)

    with pytest.raises(RunnerError, match="rank 1: lost rank 2: "):
        fill()


def test_a_rank_that_does_not_answer_is_named(joined):
    link = joined(2)[0]
    link._rank = link._rank._replace(seconds=0.5)
    link._sockets[1].settimeout(0.5)
    with pytest.raises(RunnerError, match=r"rank 0: lost rank 1: no message in 0\.5 s"):
        link.recv(1)


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_alone_does_not_wait_for_ever(number):
    address, reserved = reserve_address()
    words = f"rank {number} of 2 at 127.*cannot join"
    with reserved, pytest.raises(RunnerError, match=words):
        SocketLink(Rank(number, 2, address, 0.3))


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "h:70000", "h:x"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(RunnerError, match="address: found"):
        split_address(address)


def test_addresses_of_ipv6_are_read():
    assert split_address("[::1]:80") == ("::1", 80)
