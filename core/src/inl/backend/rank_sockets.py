"""Ranks in processes that exchange NumPy arrays over TCP, on one host or several."""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from inl.backend.collectives import Rank
from inl.bounded_json import parse_object
from inl.errors import RunnerError
from inl.readiness import receive_exactly

HEADER = struct.Struct("<8sI6Q")
"""Dtype, number of axes, and shape of an array."""
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING = struct.Struct(f"<II{NONCE_BYTES}s{PROOF_BYTES}s")
"""Of a rank that connects: its number, the port at which it listens, random bytes, and
the HMAC-SHA256, by the secret of the group, of these and of the random bytes that the
other rank has sent first. That one proves itself by another HMAC of the same, so that
the secret is never sent."""
MAX_AXES = 6
POLL_SECONDS = 0.05
"""Pause before a rank asks again for an address at which nobody listens yet."""
BUFFERED_BYTES = 1 << 15
"""Largest message that the caller sends itself: it fits in the buffers of an idle
connection."""
TABLE_BYTES = 1 << 20
"""Most bytes of the addresses of all ranks."""
CLOSE_SECONDS = 5.0
"""Time for messages that wait to be sent when a rank leaves."""
GREETING_SECONDS = 5.0
"""Time for a connection to greet: others than ranks may connect."""


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT; raises :class:`~inl.errors.RunnerError`."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise RunnerError(
            f"address: found {address!r:.80}, accepted: HOST:PORT, such as "
            "127.0.0.1:29500"
        )
    return host.strip("[]"), int(port)


def reserve_address(host: str = "127.0.0.1") -> tuple[str, socket.socket]:
    """Return an address at which nobody listens, and a socket that reserves it.

    On Linux rank 0 can listen there while the socket is open, and the system gives its
    port to nobody else. Elsewhere the socket is closed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    shown = f"[{host}]" if ":" in host else host
    address = f"{shown}:{reserved.getsockname()[1]}"
    if sys.platform != "linux":
        reserved.close()
    return address, reserved


class SocketLink:
    """Connections of one rank to all others; the constructor makes them.

    Rank 0 listens at :attr:`~inl.backend.collectives.Rank.address` and gives every rank
    the addresses of the others. Raises :class:`~inl.errors.RunnerError` if they have
    not all connected within ``rank.seconds``.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._deadline = time.monotonic() + rank.seconds
        self._secret = rank.secret.encode()
        self._sockets: dict[int, socket.socket] = {}
        self._senders = _Senders(self._sockets)
        self.close = weakref.finalize(self, self._senders.close)
        """Closes all connections; ranks that wait for this one then fail."""
        try:
            self._connect()
        except (OSError, ValueError, struct.error) as error:
            self.close()
            raise RunnerError(
                f"rank {rank.number} of {rank.ranks} at {rank.address}: cannot join "
                f"the group: {error}"
            ) from error
        for connection in self._sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(rank.seconds)

    def send(self, x: Any, target: int) -> None:
        x = np.asarray(x, order="C")
        shape = (*x.shape, *(0,) * (MAX_AXES - x.ndim))
        header = HEADER.pack(x.dtype.str.encode(), x.ndim, *shape)
        data = header + x.tobytes()
        try:
            if self._senders.is_sending(target) or len(data) > BUFFERED_BYTES:
                self._senders.put(target, data)
            else:
                self._sockets[target].sendall(data)
        except OSError as error:
            raise self._lost(target, error) from error

    def recv(self, source: int) -> Any:
        connection = self._sockets[source]
        try:
            name, axes, *shape = HEADER.unpack(_read(connection, HEADER.size))
            x = np.empty(shape[:axes], np.dtype(name.rstrip(b"\0").decode()))
            if x.nbytes:
                _read_into(connection, x.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise self._lost(source, error) from error
        return x

    def _lost(self, peer: int, error: OSError) -> RunnerError:
        late = isinstance(error, TimeoutError)
        reason = f"no message in {self._rank.seconds:g} s" if late else str(error)
        return RunnerError(f"rank {self._rank.number}: lost rank {peer}: {reason}")

    def _connect(self) -> None:
        """Connect to rank 0, read the addresses there, then connect to the others."""
        rank, (host, port) = self._rank, split_address(self._rank.address)
        if rank.number == 0:
            with socket.create_server((host, port), backlog=rank.ranks) as listening:
                addresses = self._accept(listening, range(1, rank.ranks))
            table = json.dumps(addresses).encode()
            for connection in self._sockets.values():
                connection.sendall(struct.pack("<I", len(table)) + table)
            return
        first = self._reach(host, port)
        with socket.create_server((first.getsockname()[0], 0)) as listening:
            self._sockets[0] = first
            self._greet(first, listening.getsockname()[1])
            (length,) = struct.unpack("<I", self._received(first, 4))
            said = self._received(first, min(length, TABLE_BYTES))
            others = parse_object(said, f"rank {rank.number}: addresses of ranks")
            for number in range(1, rank.number):
                other = self._reach(*others[str(number)])
                self._sockets[number] = other
                self._greet(other, 0)
            self._accept(listening, range(rank.number + 1, rank.ranks))

    def _accept(
        self, listening: socket.socket, numbers: range
    ) -> dict[int, tuple[str, int]]:
        """Accept these ranks and return the host and port at which each listens."""
        addresses: dict[int, tuple[str, int]] = {}
        while len(addresses) < len(numbers):
            listening.settimeout(
                self._left(f"ranks {sorted({*numbers} - {*addresses})}")
            )
            connection, peer = listening.accept()
            with suppress(OSError):
                end = time.monotonic() + GREETING_SECONDS
                nonce = secrets.token_bytes(NONCE_BYTES)
                connection.sendall(nonce)
                greeting = receive_exactly(connection, GREETING.size, end)
                number, port, _, proof = GREETING.unpack(greeting)
                said = nonce + greeting[:-PROOF_BYTES]
                known = hmac.compare_digest(proof, self._proof(b"connects", said))
                if known and number in numbers:
                    connection.sendall(self._proof(b"listens", said))
                    connection.settimeout(self._left(f"rank {number}"))
                    self._sockets[number] = connection
                    addresses[number] = peer[0], port
                    continue
            connection.close()
        return addresses

    def _reach(self, host: str, port: int) -> socket.socket:
        """Connect to a rank, which may not listen yet."""
        while True:
            left = self._left(f"{host}:{port}")
            try:
                connection = socket.create_connection((host, port), left)
            except ConnectionRefusedError:
                time.sleep(min(POLL_SECONDS, left))
                continue
            # A port connects to itself where nobody listens and it is chosen for both.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()

    def _greet(self, connection: socket.socket, port: int) -> None:
        """Prove this rank to another one, and check that one's proof."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        begun = GREETING.pack(self._rank.number, port, nonce, b"")[:-PROOF_BYTES]
        said = self._received(connection, NONCE_BYTES) + begun
        connection.sendall(begun + self._proof(b"connects", said))
        proof = self._received(connection, PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"listens", said)):
            raise ConnectionError("who listens there does not know the secret")

    def _proof(self, side: bytes, said: bytes) -> bytes:
        return hmac.digest(self._secret, side + said, "sha256")

    def _received(self, connection: socket.socket, count: int) -> bytes:
        return receive_exactly(connection, count, self._deadline)

    def _left(self, awaited: str) -> float:
        """Return the seconds that are left; raises TimeoutError without any."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no answer of {awaited} in {self._rank.seconds:g} s")
        return left


class _Senders:
    """Threads that send large messages: a rank may send before its peer receives."""

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._sockets = sockets
        self._queues: dict[int, queue.Queue[bytes | None]] = {}
        self._errors: dict[int, OSError] = {}
        self._threads: list[threading.Thread] = []

    def is_sending(self, target: int) -> bool:
        """Whether messages to a rank are not sent yet; raises the error of one."""
        if target in self._errors:
            raise self._errors[target]
        waiting = self._queues.get(target)
        return waiting is not None and waiting.unfinished_tasks > 0

    def put(self, target: int, data: bytes) -> None:
        """Send a message after those that wait."""
        if target not in self._queues:
            self._queues[target] = queue.Queue()
            name = f"inl-send-{target}"
            thread = threading.Thread(
                target=self._run, args=(target,), name=name, daemon=True
            )
            thread.start()
            self._threads.append(thread)
        self._queues[target].put(data)

    def _run(self, target: int) -> None:
        waiting, connection = self._queues[target], self._sockets[target]
        while True:
            data = waiting.get()
            if data is None:
                return
            try:
                connection.sendall(data)
            except OSError as error:
                self._errors[target] = error
                return
            waiting.task_done()

    def close(self) -> None:
        """Send what waits, for some seconds, and close all connections."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)
        for connection in self._sockets.values():
            with suppress(OSError):  # ends a thread that waits for the peer
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _read_into(connection, memoryview(data))
    return bytes(data)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view``; raises OSError if the connection ends before."""
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("its connection is closed")
        view = view[count:]
