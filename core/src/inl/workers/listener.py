"""The engine's port: authenticates workers, and hands each to its seat."""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from inl.errors import DeviceError, ProtocolError
from inl.forks import disconnect, on_fork
from inl.workers.encryption import TlsSocket, new_certificate
from inl.workers.handshake import (
    ANY_SEAT,
    HEAD,
    KNOCK_BYTES,
    MAC_BYTES,
    MAGIC,
    Joined,
    Knock,
    Role,
    answer,
    check_head,
    greeting,
    mac,
    read_knock,
    set_options,
)
from inl.workers.settings import INSECURE, is_encrypted, parse_address, show_address

log = logging.getLogger("inl.worker")

KNOCK_SECONDS = 5.0
"""Time for a connection to authenticate, and for a worker's second connection."""
MAX_KNOCKS = 64
"""Connections that are not authenticated yet; one more closes the oldest."""
LOG_SECONDS = 10.0
"""Shortest time between two messages about refused connections."""
POLL_SECONDS = 0.25
TLS_RECORD = b"\x16"
"""First byte of a handshake of TLS."""
HEAD_BYTE = MAGIC[:1]


class _Visitor:
    """A connection that has not proved anything yet."""

    def __init__(self, sock: socket.socket, address: Any) -> None:
        self.sock = sock
        self.host = str(address[0])
        self.peer = show_address(self.host, address[1])
        self.is_known = False
        """Whether its first byte has said if it is encrypted."""
        self.is_ready = True
        """Whether TLS is established, or not needed."""
        self.binding = b""
        """Digest of the certificate that it has seen."""
        self.greeting = b""
        self.data = b""
        self.end = time.monotonic() + KNOCK_SECONDS
        self.awaited = ""
        """What it waits for, once its knock is whole."""

    @property
    def said(self) -> bytes:
        """What both proofs are made of."""
        head, knock = self.data[: HEAD.size], self.data[HEAD.size : -MAC_BYTES]
        return self.binding + head + self.greeting + knock


class _First(NamedTuple):
    """The connection for frames of a worker whose other one is awaited."""

    sock: socket.socket
    knock: Knock
    peer: str
    end: float


class Seat:
    """The place of one worker of this engine: number, secret and, once joined, worker.

    of: workers that this engine awaits at the address. Those that come before their
    seat is opened wait for it. Raises :class:`~inl.errors.DeviceError` if the number is
    in use at this address, or the address cannot be used.
    """

    def __init__(self, address: str, number: int, secret: bytes, of: int = 1) -> None:
        self.number = number
        self.of = max(of, number + 1)
        self.secret = secret
        self.taken = ""
        """The worker that has it."""
        self.first: _First | None = None
        self._joined: Joined | None = None
        self._event = threading.Event()
        self._listener = _listener(address, self)
        self.address = self._listener.address
        """``HOST:PORT`` with the port that was opened."""

    def joined(self, seconds: float) -> Joined | None:
        """Take the worker's connections; ``None`` if none comes in time."""
        self._event.wait(seconds)
        joined, self._joined = self._joined, None
        return joined

    def give(self, joined: Joined) -> None:
        """Hand the connections of a worker to whoever waits for it."""
        self._joined = joined
        self._event.set()

    def close(self) -> None:
        """Give the seat up; the port is closed with its last one."""
        _release(self._listener, self)
        joined, first = self._joined, self.first
        if joined is not None:
            joined.frames.close()
            joined.heartbeat.close()
        if first is not None:
            first.sock.close()


_lock = threading.Lock()
_listeners: dict[str, _Listener] = {}
"""Open ports by the address that was asked for, except for port 0."""


def _listener(address: str, seat: Seat) -> _Listener:
    with _lock:
        listener = _listeners.get(address)
        if listener is None or listener.closed.is_set():
            listener = _Listener(address)
            if not address.endswith(":0"):
                _listeners[address] = listener
        if seat.number in listener.seats:
            raise DeviceError(
                f"{address}: worker {seat.number} of this address is another engine's; "
                "accepted: an address for each engine"
            )
        listener.seats[seat.number] = seat
        return listener


def _release(listener: _Listener, seat: Seat) -> None:
    with _lock:
        if listener.seats.get(seat.number) is seat:
            del listener.seats[seat.number]
        if not listener.seats:
            listener.close()


class _Listener:
    """A listening socket, served by one thread without waiting for any connection."""

    def __init__(self, address: str) -> None:
        host, port = parse_address(address)
        self._certificate = new_certificate() if is_encrypted(host) else None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise DeviceError(
                f"{address}: cannot listen for workers: {error.strerror}; accepted: an "
                "address of this host with a free port, 0 for any"
            ) from error
        self._socket.setblocking(False)
        self.address = show_address(host, self._socket.getsockname()[1])
        self.seats: dict[int, Seat] = {}
        self.closed = threading.Event()
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._refused, self._logged = 0, float("-inf")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        on_fork(self)
        threading.Thread(target=self._run, name="inl-listener", daemon=True).start()

    def after_fork_in_child(self) -> None:
        """Leave the port to the parent."""
        self.closed.set()
        disconnect(self._socket.fileno())

    def close(self) -> None:
        """Stop listening; the thread closes the socket."""
        self.closed.set()
        # Another engine may want the address before the thread has looked.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while not self.closed.is_set():
            try:
                ready = self._selector.select(POLL_SECONDS)
            except (OSError, ValueError):
                break
            for key, _ in ready:
                if self.closed.is_set():
                    break
                if key.fileobj is self._socket:
                    self._accept()
                elif visitor := self._visitors.get(key.fileobj):  # type: ignore[call-overload]
                    self._read(visitor)
            self._expire()
        for visitor in list(self._visitors.values()):
            self._dismiss(visitor).close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, address = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # Without descriptors left, the connection stays in the backlog.
            time.sleep(POLL_SECONDS)
            return
        sock.setblocking(False)
        while len(self._visitors) >= MAX_KNOCKS:
            oldest = next(iter(self._visitors.values()))
            self._refuse(oldest, "too many connections that prove nothing")
        self._register(_Visitor(sock, address))

    def _register(self, visitor: _Visitor) -> None:
        self._selector.register(visitor.sock, selectors.EVENT_READ)
        self._visitors[visitor.sock] = visitor

    def _read(self, visitor: _Visitor) -> None:
        try:
            if not visitor.is_known:
                self._begin(visitor)
            if not visitor.is_ready:
                assert isinstance(visitor.sock, TlsSocket), "it began with TLS"
                visitor.sock.do_handshake()
                visitor.is_ready = True
            part = visitor.sock.recv(HEAD.size + KNOCK_BYTES - len(visitor.data))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            part = b""
        except ProtocolError as error:
            self._refuse(visitor, str(error))
            return
        visitor.data += part
        if not part:
            self._refuse(visitor, "it ended the handshake")
        elif len(visitor.data) >= HEAD.size:
            try:
                self._answer(visitor)
            except ProtocolError as error:
                self._refuse(visitor, str(error))

    def _begin(self, visitor: _Visitor) -> None:
        """Establish TLS with a connection that begins as TLS does."""
        first = visitor.sock.recv(1, socket.MSG_PEEK)
        visitor.is_known = True
        if first == TLS_RECORD and self._certificate is not None:
            self._dismiss(visitor)
            visitor.sock = self._certificate.context.wrap_socket(
                visitor.sock, server_side=True, do_handshake_on_connect=False
            )
            self._register(visitor)
            visitor.binding, visitor.is_ready = self._certificate.digest, False
        elif first == HEAD_BYTE and is_encrypted(visitor.host):
            raise ProtocolError(
                f"workers of other hosts encrypt; unset {INSECURE} there, or set it in "
                "both, in a network of trusted hosts only"
            )

    def _answer(self, visitor: _Visitor) -> None:
        """Greet a worker, or admit one that was greeted before."""
        version = check_head(visitor.data)
        if not visitor.greeting:
            visitor.greeting = greeting(version)
            with suppress(OSError):  # as after every failed send, the end is read
                visitor.sock.send(visitor.greeting)
        if len(visitor.data) == HEAD.size + KNOCK_BYTES:
            with _lock:
                self._admit(visitor, *read_knock(visitor.data[HEAD.size :]))

    def _admit(self, visitor: _Visitor, knock: Knock, proof: bytes) -> None:
        visitor.awaited = self._awaited(knock)
        if visitor.awaited:
            return
        seat = self._find(knock, proof, visitor.said)
        if knock.role == Role.FRAMES:
            self._check_free(seat)
            seat.taken = f"process {knock.pid} from {visitor.peer}"
            sock = self._accepted(visitor, seat)
            seat.first = _First(
                sock, knock, visitor.peer, time.monotonic() + KNOCK_SECONDS
            )
            return
        first = seat.first
        if first is None or first.knock.worker != knock.worker:
            raise ProtocolError(f"seat {seat.number} awaits another worker")
        sock = self._accepted(visitor, seat)
        seat.first = None
        seat.give(Joined(first.sock, sock, seat.number, first.peer, knock.pid))

    def _awaited(self, knock: Knock) -> str:
        """Return what a worker waits for whose seat is not opened yet, or nothing."""
        count = max((seat.of for seat in self.seats.values()), default=0)
        if len(self.seats) >= count or knock.seat in self.seats:
            return ""
        if knock.seat != ANY_SEAT:
            return f"seat {knock.seat} of {count}" if knock.seat < count else ""
        taken = all(seat.taken for seat in self.seats.values())
        return f"a seat beside the {len(self.seats)} of {count}" if taken else ""

    def _find(self, knock: Knock, proof: bytes, said: bytes) -> Seat:
        """Return the seat whose secret the worker knows."""
        asked = [self.seats[knock.seat]] if knock.seat in self.seats else []
        seats = list(self.seats.values()) if knock.seat == ANY_SEAT else asked
        known = [
            seat
            for seat in seats
            if hmac.compare_digest(proof, mac(seat.secret, b"worker", said))
        ]
        if not seats:
            raise ProtocolError(
                f"no seat {knock.seat}; seats: {', '.join(map(str, self.seats))}"
            )
        if not known:
            raise ProtocolError("wrong secret")
        return next((seat for seat in known if not seat.taken), known[0])

    def _check_free(self, seat: Seat) -> None:
        if seat.taken:
            raise ProtocolError(
                f"seat {seat.number} is taken by {seat.taken}; this engine has "
                f"{len(self.seats)} for workers"
            )

    def _accepted(self, visitor: _Visitor, seat: Seat) -> socket.socket:
        sock = self._dismiss(visitor)
        proof = mac(seat.secret, b"engine", visitor.said)
        with suppress(OSError):  # it has gone: the heartbeat or the channel notices
            sock.send(answer(True, seat.number, proof))
            set_options(sock)
        return sock

    def _dismiss(self, visitor: _Visitor) -> socket.socket:
        del self._visitors[visitor.sock]
        self._selector.unregister(visitor.sock)
        return visitor.sock

    def _refuse(self, visitor: _Visitor, reason: str) -> None:
        sock = self._dismiss(visitor)
        with suppress(OSError):
            sock.send(answer(False, 0, bytes(32), reason))
            # Closing with unread data would reset the connection, and lose the answer.
            sock.recv(4096)
        sock.close()
        self._refused += 1
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            log.warning(
                "%s: refused %d connection(s); the last, from %s: %s",
                self.address, self._refused, visitor.peer, reason,
            )  # fmt: skip
            self._refused, self._logged = 0, now

    def _expire(self) -> None:
        now = time.monotonic()
        for visitor in [each for each in self._visitors.values() if each.awaited]:
            try:
                self._answer(visitor)
            except ProtocolError as error:
                self._refuse(visitor, str(error))
        for visitor in [each for each in self._visitors.values() if each.end < now]:
            awaited = visitor.awaited
            found = f"{awaited} was not opened" if awaited else "proved nothing"
            self._refuse(visitor, f"{found} within {KNOCK_SECONDS:g} s")
        with _lock:
            for seat in self.seats.values():
                first = seat.first
                if first is not None and first.end < now:
                    seat.first, seat.taken = None, ""
                    first.sock.close()
