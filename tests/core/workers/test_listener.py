"""The port for workers: who is let in, who is not and why, and what floods it."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from free_ports import unused_address
from inl.errors import DeviceError, ProtocolError
from inl.workers import handshake, listener, settings
from inl.workers.handshake import ANY_SEAT, KNOCK_BYTES, join
from inl.workers.listener import Seat
from started_workers import knock, raw, receive, refusal
from waiting import until

SECRET = bytes(range(32))
OTHER = bytes(32)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Connections of a busy machine are no half-open ones."""
    monkeypatch.setattr(listener, "KNOCK_SECONDS", 300.0)


@pytest.fixture
def seat():
    opened = Seat("127.0.0.1:0", 0, SECRET)
    yield opened
    opened.close()


def joined(seat):
    found = seat.joined(60)
    assert found is not None
    return found


def close(*pairs):
    for each in pairs:
        each.frames.close()
        each.heartbeat.close()


def test_both_connections_lead_to_the_worker(seat):
    there = join(seat.address, SECRET, ANY_SEAT, 0)
    here = joined(seat)
    assert (there.seat, here.seat, here.pid) == (0, 0, there.pid)
    for name in ("frames", "heartbeat"):
        getattr(here, name).sendall(name.encode())
        assert receive(getattr(there, name), len(name)) == name.encode()
    close(here, there)


def test_the_secret_is_not_sent(seat):
    sock, greeted = raw(seat.address)
    said = knock(greeted, SECRET)
    sock.sendall(said)
    answered = receive(sock, handshake.ANSWER.size)
    sock.close()
    assert SECRET not in greeted + said + answered
    assert answered[0] == 1


def test_a_wrong_secret(seat):
    with pytest.raises(ProtocolError, match="refused this worker: wrong secret"):
        join(seat.address, OTHER, 0, 0)
    there = join(seat.address, SECRET, 0, 0)
    close(there, joined(seat))


def test_what_was_heard_cannot_be_said_again(seat):
    """A proof is for the greeting of its connection."""
    sock, greeted = raw(seat.address)
    other, _ = raw(seat.address)
    other.sendall(knock(greeted, SECRET))
    assert refusal(other) == "wrong secret"
    sock.close()
    other.close()


def test_each_bit_of_a_proof_counts(seat):
    for at in (0, 2, 30, KNOCK_BYTES - 32, KNOCK_BYTES - 1):
        sock, greeted = raw(seat.address)
        said = bytearray(knock(greeted, SECRET))
        said[at] ^= 1
        sock.sendall(said)
        assert refusal(sock)
        sock.close()


def test_a_worker_that_is_too_old(seat):
    sock, _ = raw(seat.address, handshake.HEAD.pack(handshake.MAGIC, 0))
    assert "version 0 of the handshake, this engine 1 to 1" in refusal(sock)
    sock.close()


def test_a_newer_worker_is_told_the_version_of_the_engine(seat, monkeypatch):
    monkeypatch.setattr(handshake, "VERSION", 9)
    sock, _ = raw(seat.address, handshake.HEAD.pack(handshake.MAGIC, 9))
    assert handshake.GREETING.unpack(receive(sock, 38))[:2] == (handshake.MAGIC, 9)
    sock.close()
    monkeypatch.setattr(handshake, "VERSION", 1)
    sock, _ = raw(seat.address, handshake.HEAD.pack(handshake.MAGIC, 9))
    assert handshake.GREETING.unpack(receive(sock, 38))[1] == 1
    sock.close()


def test_a_worker_that_asks_for_a_newer_engine(seat, monkeypatch):
    monkeypatch.setattr(handshake, "OLDEST", 0)
    monkeypatch.setattr(handshake, "VERSION", 0)
    seat.close()
    with (
        engine_that_says(handshake.GREETING.pack(b"INLW", 7, bytes(32))) as address,
        pytest.raises(ProtocolError, match="with version 0 to 0 of the handshake"),
    ):
        join(address, SECRET, 0, 0)


def test_what_speaks_another_protocol(seat):
    sock, _ = raw(seat.address, b"GET / HTTP/1.1\r\n")
    assert refusal(sock) == "not a worker of INL"
    sock.close()


def test_two_workers_for_one_seat(seat):
    first = join(seat.address, SECRET, 0, 0)
    here = joined(seat)
    with pytest.raises(ProtocolError, match="seat 0 is taken by process "):
        join(seat.address, SECRET, 0, 0)
    with pytest.raises(ProtocolError, match="seat 0 is taken by process "):
        join(seat.address, SECRET, ANY_SEAT, 0)
    with pytest.raises(ProtocolError, match="no seat 3; seats: 0"):
        join(seat.address, SECRET, 3, 0)
    close(first, here)


def test_seats_of_one_address_fill_one_by_one():
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    seats = [Seat(address, number, SECRET) for number in range(3)]
    with pytest.raises(DeviceError, match="worker 1 of this address is another"):
        Seat(address, 1, SECRET)
    wanted = (2, ANY_SEAT, ANY_SEAT)
    workers = [join(address, SECRET, number, 0) for number in wanted]
    assert [each.seat for each in workers] == [2, 0, 1]
    close(*workers, *map(joined, seats))
    for seat in seats:
        seat.close()
    # The port is free again.
    Seat(address, 0, SECRET).close()


@pytest.mark.parametrize("wanted", [ANY_SEAT, 1])
def test_a_worker_waits_for_a_seat_that_is_opened_later(wanted):
    first = Seat(address := unused_address(), 0, SECRET, of=2)
    workers = [join(address, SECRET, ANY_SEAT, 0)]
    late = threading.Thread(
        target=lambda: workers.append(join(address, SECRET, wanted, 0))
    )
    late.start()
    visitors = first._listener._visitors
    until(lambda: any(each.awaited for each in list(visitors.values())))
    second = Seat(address, 1, SECRET, of=2)
    late.join(60)
    assert [each.seat for each in workers] == [0, 1]
    with pytest.raises(ProtocolError, match="seat 0 is taken by process "):
        join(address, SECRET, ANY_SEAT, 0)
    with pytest.raises(ProtocolError, match="no seat 2; seats: 0, 1"):
        join(address, SECRET, 2, 0)
    close(*workers, joined(first), joined(second))
    first.close()
    second.close()


def test_a_seat_that_is_never_opened():
    seat = Seat(unused_address(), 0, SECRET, of=2)
    sock, greeted = raw(seat.address)
    sock.sendall(knock(greeted, SECRET, seat=1))
    visitors = seat._listener._visitors
    until(lambda: any(each.awaited for each in list(visitors.values())))
    next(iter(visitors.values())).end = 0.0
    assert refusal(sock) == "seat 1 of 2 was not opened within 300 s"
    sock.close()
    seat.close()


def test_a_heartbeat_of_another_worker(seat):
    sock, greeted = raw(seat.address)
    sock.sendall(knock(greeted, SECRET, worker=b"a" * 16))
    assert receive(sock, handshake.ANSWER.size)[0] == 1
    other, greeted = raw(seat.address)
    other.sendall(knock(greeted, SECRET, role=1, worker=b"b" * 16))
    assert refusal(other) == "seat 0 awaits another worker"
    sock.close()
    other.close()


def test_half_open_connections_are_closed(seat):
    silent, _ = raw(seat.address, b"")
    half, greeted = raw(seat.address)
    half.sendall(knock(greeted, SECRET)[:50])
    visitors = seat._listener._visitors
    until(lambda: len(visitors) == 2)
    for visitor in list(visitors.values()):
        visitor.end = 0.0  # its time is over
    for sock in (silent, half):
        assert refusal(sock) == "proved nothing within 300 s"
        sock.close()


def test_a_worker_without_a_heartbeat_gives_its_seat_up(seat):
    sock, greeted = raw(seat.address)
    sock.sendall(knock(greeted, SECRET))
    until(lambda: seat.first is not None)
    seat.first = seat.first._replace(end=0.0)  # its time is over
    assert receive(sock, 10_000)[0] == 1  # to the end
    sock.close()
    there = join(seat.address, SECRET, 0, 0)
    close(there, joined(seat))


def test_a_flood_of_connections_keeps_no_worker_out(seat):
    before = threading.active_count()
    flood = [raw(seat.address)[0] for _ in range(100)]
    flood += [raw(seat.address, b"")[0] for _ in range(100)]
    there = join(seat.address, SECRET, 0, 0)
    here = joined(seat)
    # Threads of earlier tests may have ended meanwhile.
    assert threading.active_count() <= before
    for sock in flood:
        sock.setblocking(False)
    closed = 0
    for sock in flood:
        try:
            closed += bool(sock.recv(1000))
        except BlockingIOError:
            """Not refused yet."""
        sock.close()
    assert closed >= 200 - listener.MAX_KNOCKS
    close(here, there)


def test_an_engine_that_does_not_know_the_secret():
    """A worker serves nobody who only pretends to be its engine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def pretend():
            sock, _ = server.accept()
            with sock:
                receive(sock, handshake.HEAD.size)
                sock.sendall(handshake.greeting())
                receive(sock, KNOCK_BYTES)
                sock.sendall(handshake.answer(True, 0, bytes(32)))
                receive(sock, 1)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ProtocolError, match="does not know the secret"):
            join(address, SECRET, 0, 0)
        thread.join()


@contextmanager
def engine_that_says(said):
    """The address of a server that answers each connection so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            with suppress(OSError):
                sock, _ = server.accept()
                sock.recv(100)
                sock.sendall(said)
                sock.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n" + bytes(40)])
def test_what_is_no_engine(said):
    with (
        engine_that_says(said) as address,
        pytest.raises(ProtocolError, match=r"engine 127\.0\.0\.1:"),
    ):
        join(address, SECRET, 0, 0)


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(DeviceError, match=r"cannot connect: .*start the engine first"):
        join(address, SECRET, 0, 0)


@pytest.mark.parametrize(
    "text", ["", "7000", ":7000", "host", "host:", "host:x", "host:65536", "::1:70"]
)
def test_what_is_no_address(text):
    with pytest.raises(DeviceError, match=r"accepted: HOST:PORT"):
        settings.parse_address(text)


def test_addresses_of_both_families():
    assert settings.parse_address("[::1]:70") == ("::1", 70)
    assert settings.show_address("::1", 70) == "[::1]:70"
    assert settings.parse_address("node-1:0") == ("node-1", 0)


def test_a_secret_in_a_private_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET.hex() + "\n")
    path.chmod(0o600)
    names = {"INL_WORKER_SECRET_FILE": str(path)}
    assert settings.read_secret(names) == SECRET
    assert settings.read_secret({}) is None
    path.chmod(0o640)
    with pytest.raises(DeviceError, match=f"other users may read .*chmod 600 {path}"):
        settings.read_secret(names)
    with pytest.raises(DeviceError, match=r"cannot be read: No such file"):
        settings.read_secret({"INL_WORKER_SECRET_FILE": str(tmp_path / "none")})


@pytest.mark.parametrize("text", ["", "ab" * 31, "xy" * 32, "ab" * 33])
def test_a_secret_of_another_length_is_not_shown(text):
    with pytest.raises(DeviceError, match="accepted: 64 hexadecimal") as caught:
        settings.read_secret({"INL_WORKER_SECRET": text})
    assert not text or text not in str(caught.value)
