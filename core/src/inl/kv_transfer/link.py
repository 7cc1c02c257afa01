"""A connection between two engines, over which contents of blocks are pushed.

Both sides know a secret, which is never sent. The decoding engine connects and sends
HELLO, a magic, a version and random bytes; the other one answers with its own; both
then send an HMAC of the two, the decoding engine first. Between hosts all of this is
inside TLS, and the digest of the certificate is part of both, see
:mod:`inl.workers.encryption`.

Each message that follows is its kind, its length, an HMAC with a key of this connection
of the number of the message and of a checksum of its payload, and this payload: JSON,
and for SPAN contents behind it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import ssl
import struct
import time
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from inl.bounded_json import parse_object
from inl.errors import DeviceError, InvalidJson, ProtocolError
from inl.kv_transfer.checksums import checksum
from inl.protocol.wire_arrays import content_pieces, read_contents
from inl.readiness import READABLE, receive_exactly, waiter
from inl.workers.encryption import encrypt
from inl.workers.handshake import mac
from inl.workers.settings import (
    MAKE_SECRET,
    SECRET,
    SECRET_FILE,
    is_encrypted,
    parse_address,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from inl.kv_transfer.checksums import Piece
    from inl.spec.cache_layout import Parts

    Memory = NDArray[np.uint8]

VERSION = 3
HELLO = struct.Struct("<4sH32s")
MAGIC = b"INLB"
MAC_BYTES = 32
PREFIX = struct.Struct("<BQI32s")
"""Kind, length of the payload, length of its JSON, HMAC."""
MAX_BYTES = 1 << 30
"""Longest payload."""
CONNECT_SECONDS = 2.0
HELLO_SECONDS = 5.0
WAIT_SECONDS = 0.25
"""Between two questions whether anybody waits for a message."""
CHUNK = 1 << 20


class Kind(IntEnum):
    """Kinds of messages."""

    ASK = 1
    """To the prefilling engine: a ticket, and the prompt that it is for."""
    SPAN = 2
    """To the decoding engine: contents of consecutive blocks."""
    DONE = 3
    """That all were sent."""
    REFUSED = 4
    """That none will be sent, and why."""
    TAKE = 5
    """To an engine that holds contents of a request that it has left: their ticket."""
    READ = 6
    """To the prefilling engine: contents beside the link were read."""


class Message(NamedTuple):
    """A received message."""

    kind: Kind
    fields: dict[str, Any]
    parts: Parts


class Sealed(NamedTuple):
    """A message that was read, and not checked."""

    kind: int
    head: bytes
    """Its JSON."""
    contents: Memory
    """uint8 [n], the beginning of ``memory``."""
    proof: bytes
    memory: Memory | None
    """For another message."""


def link_secret(secret: bytes | None, host: str) -> bytes:
    """Return the secret of links with a host; on this one, none is needed.

    Raises :class:`~inl.errors.DeviceError`.
    """
    if secret is None and is_encrypted(host):
        raise DeviceError(
            f"{host}: found no secret, by which engines know each other; set "
            f"{SECRET_FILE} to a private file, or {SECRET}, here and there; "
            f"{MAKE_SECRET}"
        )
    return secret or bytes(MAC_BYTES)


class Link:
    """An authenticated connection. Everything raises OSError after ``end``.

    end: ``monotonic()`` time. Not thread-safe.
    """

    def __init__(self, sock: socket.socket, key: bytes, end: float) -> None:
        self._socket, self._key, self._end = sock, key, end
        self._sent = self._received = 0
        self.is_wanted: Callable[[], bool] = lambda: True
        """Asked while nothing arrives; if not, ConnectionAbortedError is raised."""

    def send(
        self, kind: Kind, fields: dict[str, Any], parts: Parts | None = None
    ) -> None:
        """Send a message; waits until the other side has room for it."""
        head = json.dumps(fields).encode()
        pieces = [head, *(() if parts is None else content_pieces(parts))]
        size, rest = sum(map(len, pieces)), pieces[1:]
        proof = self._proof(self._sent, kind, head, rest)
        self._sent += 1
        self._write(PREFIX.pack(kind, size, len(head), proof) + head)
        for piece in rest:
            self._write(piece)

    def receive(self, max_bytes: int = MAX_BYTES) -> Message:
        """Wait for a message.

        max_bytes: longest payload. Raises :class:`~inl.errors.ProtocolError` for a
        longer or damaged one.
        """
        return self.opened(self.read_sealed(max_bytes=max_bytes))

    def read_sealed(
        self, memory: Memory | None = None, max_bytes: int = MAX_BYTES
    ) -> Sealed:
        """Read a message into memory, if it has room there; raises as :meth:`receive`.

        On any thread, while :meth:`opened` checks the one before.
        """
        prefix = bytearray(PREFIX.size)
        self._read(memoryview(prefix))
        kind, length, head, proof = PREFIX.unpack(prefix)
        if kind not in Kind.__members__.values() or not head <= length <= max_bytes:
            raise ProtocolError(
                f"message: found kind {kind} of {length} bytes, accepts kinds "
                f"{min(Kind):d} to {max(Kind):d} of at most {max_bytes}"
            )
        said = bytearray(head)
        self._read(memoryview(said))
        if length > head and (memory is None or len(memory) < length - head):
            memory = new_memory(length - head)
        contents = new_memory(0) if memory is None else memory[: length - head]
        self._read(contents.data)
        return Sealed(kind, bytes(said), contents, proof, memory)

    def opened(self, sealed: Sealed) -> Message:
        """Check the next message that was read; raises as :meth:`receive`.

        Its contents share the memory.
        """
        data = sealed.contents.data
        own = self._proof(
            self._received, sealed.kind, sealed.head, [data] if len(data) else []
        )
        self._received += 1
        if not hmac.compare_digest(sealed.proof, own):
            raise ProtocolError("message: the checksum is wrong")
        try:
            fields = parse_object(sealed.head, "message")
        except InvalidJson as error:
            raise ProtocolError(str(error)) from None
        parts = read_contents(data) if len(data) else {}
        return Message(Kind(sealed.kind), fields, parts)

    @property
    def seconds_left(self) -> float:
        """Time until it expires; 0 afterwards."""
        return max(self._end - time.monotonic(), 0.0)

    def extend(self, end: float) -> None:
        """Change the time at which it expires."""
        self._end = end

    def is_closed(self, seconds: float) -> bool:
        """Wait so long; whether the other side has closed, or sent what it must not."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poll = waiter()  # select() takes no descriptor above 1023
        poll.register(self._socket, READABLE)
        return bool(poll.poll(seconds * 1000))

    def shut_down(self) -> None:
        """End the connection; a thread that reads from it returns."""
        with suppress(OSError):  # the other side has ended it
            # Not that of TLS, whose thread would go on with plain bytes.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; closing twice is allowed."""
        self._socket.close()

    def _proof(
        self, number: int, kind: int, head: bytes, pieces: Sequence[Piece]
    ) -> bytes:
        said = struct.pack("<QBI", number, kind, len(head)) + head
        found = hmac.new(self._key, said, "sha256")
        found.update(checksum(pieces))
        return found.digest()

    def _limit(self, most: float = float("inf")) -> None:
        """Set the time of the next call; raises TimeoutError if none is left."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the ticket has expired")
        self._socket.settimeout(min(left, most))

    def _write(self, data: Piece) -> None:
        # Not sendall(): over TLS its time limit is that of each record.
        view = memoryview(data)
        while view:
            self._limit()
            view = view[self._socket.send(view[:CHUNK]) :]

    def _read(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            self._limit(WAIT_SECONDS)
            try:
                part = self._socket.recv_into(view[at : at + CHUNK])
            except TimeoutError:
                if not self.is_wanted():
                    raise ConnectionAbortedError("the request has ended") from None
                continue
            if not part:
                raise ConnectionResetError("the other side has closed")
            at += part


def new_memory(size: int) -> Memory:
    """Return uninitialized memory of a size in bytes."""
    import numpy as np

    return np.empty(size, np.uint8)


def connect(address: str, secret: bytes | None, end: float) -> Link:
    """Connect to a prefilling engine and prove both sides.

    end: ``monotonic()`` time at which the link expires. Raises OSError,
    :class:`~inl.errors.ProtocolError` and :class:`~inl.errors.DeviceError`.
    """
    host, port = parse_address(address)
    known = link_secret(secret, host)
    sock = socket.create_connection((host, port), CONNECT_SECONDS)
    try:
        sock.settimeout(HELLO_SECONDS)
        binding = b""
        if is_encrypted(host):
            sock, binding = encrypt(sock, time.monotonic() + HELLO_SECONDS)
        hello = HELLO.pack(MAGIC, VERSION, secrets.token_bytes(32))
        sock.sendall(hello)
        limit = time.monotonic() + HELLO_SECONDS
        said = binding + hello + _hello(sock, limit)
        sock.sendall(mac(known, b"decode", said))
        try:
            proof = receive_exactly(sock, MAC_BYTES, limit)
        except ConnectionResetError as error:
            raise ConnectionResetError(f"{error}: wrong secret?") from None
        if not hmac.compare_digest(proof, mac(known, b"prefill", said)):
            raise ProtocolError(f"{address}: does not know the secret of this engine")
        return _linked(sock, known, said, end)
    except BaseException:
        sock.close()
        raise


def accept(sock: socket.socket, secret: bytes, binding: bytes, end: float) -> Link:
    """Prove both sides to a decoding engine that has connected; raises as connect."""
    theirs = _hello(sock, end)
    own = HELLO.pack(MAGIC, VERSION, secrets.token_bytes(32))
    sock.sendall(own)
    said = binding + theirs + own
    proof = receive_exactly(sock, MAC_BYTES, end)
    if not hmac.compare_digest(proof, mac(secret, b"decode", said)):
        raise ProtocolError("wrong secret")
    sock.sendall(mac(secret, b"prefill", said))
    return _linked(sock, secret, said, end)


def _linked(sock: socket.socket, secret: bytes, said: bytes, end: float) -> Link:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Link(sock, mac(secret, b"link", said), end)


def _hello(sock: socket.socket, end: float) -> bytes:
    data = receive_exactly(sock, HELLO.size, end)
    magic, version, _ = HELLO.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(
            f"found {data[:6]!r}, accepts an engine with version {VERSION} of the "
            "link; install the same inl-core in both"
        )
    return data
