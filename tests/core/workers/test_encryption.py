"""TLS between hosts: who listens, changes or pretends is left out."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from inl.errors import DeviceError, ProtocolError
from inl.protocol.wire import Channel, Kind
from inl.workers import encryption, settings
from inl.workers.handshake import join
from inl.workers.heartbeat import Heartbeat
from inl.workers.listener import Seat
from started_workers import raw, refusal

SECRET = bytes(range(32))

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="there is no program openssl"
)


@pytest.fixture(autouse=True)
def far(monkeypatch):
    """Every address is that of another host."""
    monkeypatch.setattr(settings, "_is_loopback", lambda host: False)
    for name in ("INSECURE", "CERTIFICATE"):
        monkeypatch.delenv(f"INL_WORKER_{name}", raising=False)


@pytest.fixture
def seat():
    opened = Seat("127.0.0.1:0", 0, SECRET)
    yield opened
    opened.close()


@contextmanager
def relay(address, change=lambda sock: sock):
    """A host in between: the address to connect to, and the bytes that pass it."""
    seen = [b"", b""]
    threads, sockets = [], []

    def pass_on(source, sink, at):
        while data := _receive(source):
            seen[at] += data
            with suppress(OSError):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve():
        while True:
            try:
                near, _ = server.accept()
                near.settimeout(300)
                near = change(near)
            except OSError:
                return
            far = socket.create_connection(settings.parse_address(address))
            far.settimeout(300)
            if change is not None and hasattr(near, "getpeercert"):
                far, _ = encryption.encrypt(far, time.monotonic() + 300)
            sockets.extend((near, far))
            for at, pair in enumerate(((near, far), (far, near))):
                threads.append(threading.Thread(target=pass_on, args=(*pair, at)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        main = threading.Thread(target=serve)
        main.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", seen
        server.shutdown(socket.SHUT_RDWR)
        main.join()
    for each in threads:
        each.join()
    for each in sockets:
        each.close()


def _receive(sock):
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def test_frames_of_any_size_arrive_and_nobody_reads_them(seat):
    with relay(seat.address) as (address, seen):
        there = join(address, SECRET, 0, 0)
        here = seat.joined(60)
        near, far = Channel(here.frames), Channel(there.frames)
        for size in (0, 1, 16_384, 16_385, 1_000_000):
            payload = (b"nobody reads this" * (size // 17 + 1))[:size]
            for one, other in ((near, far), (far, near)):
                one.send(Kind.MESSAGE, payload)
                while (frame := other.receive(0.01)) is None:
                    one.flush()
                assert frame.payload == payload
        beats = [Heartbeat(each.heartbeat, lambda _: None) for each in (here, there)]
        assert beats[0].wait(0.5) == ""
        for each in (near, far, *beats):
            each.close()
    for direction in seen:
        assert len(direction) > 1_000_000
        assert b"nobody reads" not in direction
        assert b"INLW" not in direction


def test_another_certificate_in_between_is_noticed(seat):
    """The proofs are those of the certificate that each side has seen."""
    false = encryption.new_certificate()

    def pretend(sock):
        return false.context.wrap_socket(sock, server_side=True)

    with (
        relay(seat.address, pretend) as (address, _),
        pytest.raises(ProtocolError, match="refused this worker: wrong secret"),
    ):
        join(address, SECRET, 0, 0)
    assert seat.joined(0.0) is None


def test_an_engine_refuses_what_is_not_encrypted(seat):
    sock, _ = raw(seat.address, b"INLW")
    assert "workers of other hosts encrypt; unset INL_WORKER_INSECURE" in refusal(sock)
    sock.close()


def test_both_sides_must_agree(monkeypatch):
    monkeypatch.setenv("INL_WORKER_INSECURE", "1")
    seat = Seat("127.0.0.1:0", 0, SECRET)
    there = join(seat.address, SECRET, 0, 0)
    here = seat.joined(60)
    for pair in (there, here):
        pair.frames.close()
        pair.heartbeat.close()
    seat.close()
    seat = Seat("127.0.0.1:0", 0, SECRET)
    monkeypatch.delenv("INL_WORKER_INSECURE")
    with pytest.raises(ProtocolError, match="or have another INL_WORKER_INSECURE"):
        join(seat.address, SECRET, 0, 0)
    seat.close()


@pytest.mark.parametrize("side", ["engine", "worker"])
def test_a_peer_that_sends_byte_by_byte_has_one_time_limit(side):
    """That of a socket begins again with each byte."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    records = b"\x16\x03\x03\x40\x00" + bytes(16_000)
    ended = threading.Event()

    def trickle():
        with suppress(OSError):
            for at in range(len(records)):
                theirs.send(records[at : at + 1])
                if ended.wait(0.01):
                    return

    thread = threading.Thread(target=trickle)
    thread.start()
    establish = encryption.encrypt
    if side == "engine":
        establish = encryption.shake_hands
        ours = encryption.new_certificate().context.wrap_socket(
            ours, server_side=True, do_handshake_on_connect=False
        )
    with pytest.raises(TimeoutError, match="was not established in time"):
        establish(ours, time.monotonic() + 0.3)
    ours.close()
    ended.set()
    thread.join()
    theirs.close()


def test_garbage_in_place_of_tls_is_closed(seat):
    sock, _ = raw(seat.address, b"\x16\x03\x01" + bytes(500))
    sock.settimeout(60)
    while _receive(sock):
        """To the end."""
    sock.close()
    there = join(seat.address, SECRET, 0, 0)
    here = seat.joined(60)
    for pair in (there, here):
        pair.frames.close()
        pair.heartbeat.close()


def test_a_certificate_of_the_users(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key", tmp_path / "crt"
    words = [*encryption.MAKE, "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    monkeypatch.setenv("INL_WORKER_CERTIFICATE", str(both))
    monkeypatch.setenv("PATH", str(tmp_path))
    seat = Seat("127.0.0.1:0", 0, SECRET)
    there = join(seat.address, SECRET, 0, 0)
    here = seat.joined(60)
    for pair in (there, here):
        pair.frames.close()
        pair.heartbeat.close()
    seat.close()


def test_an_encrypted_key_asks_no_terminal(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key", tmp_path / "crt"
    words = [word for word in encryption.MAKE if word != "-nodes"]
    words += ["-passout", "pass:abcdef", "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    monkeypatch.setenv("INL_WORKER_CERTIFICATE", str(both))
    with pytest.raises(DeviceError, match="certificate for workers of other hosts"):
        encryption.new_certificate()


def test_without_a_certificate_other_hosts_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match=r"accepted: the program openssl, INL_WORKER"):
        Seat("0.0.0.0:0", 0, SECRET)
    monkeypatch.setenv("INL_WORKER_CERTIFICATE", os.devnull)
    with pytest.raises(DeviceError, match="certificate for workers of other hosts"):
        Seat("0.0.0.0:0", 0, SECRET)


def test_which_hosts_are_others(monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("INL_WORKER_INSECURE", raising=False)
    found = [settings.is_encrypted(host) for host in ("127.0.0.1", "::1", "192.0.2.1")]
    assert found == [False, False, True]
    monkeypatch.setenv("INL_WORKER_INSECURE", "1")
    assert not settings.is_encrypted("192.0.2.1")
