"""Wire format and channel between a process and its worker (socket pair or TCP).

Each frame is a prefix of 8 bytes, little-endian - :data:`MAGIC` (2), kind (2), length
of the payload (4) - and the payload::

    HELLO     worker   JSON: protocol, contract, message, core, python, features
    CHECK     both     JSON: what the worker is asked about its place before OPEN, see
                       inl.runners.place_check, and its answer
    OPEN      parent   JSON: options of the worker's factory
    PROGRESS  worker   int64 [3]: done, total, index of the LoadStage
    READY     worker   JSON: limits, device, dtype, cache layout
    MESSAGE   parent   int32: a frame of inl.spec.message, unchanged
    MASKS     parent   int32: step, rows, words per row, masks
    COLLECT   parent   empty: requests the reply to the oldest step
    REPLY     worker   int32: step, R, W, tokens [R, W]; with scores then N,
                       chosen [R * W], ids [R * W, N], values [R * W, N]; with
                       loads of experts -R, and before the tokens L, E, loads [L, E]
    ERROR     worker   JSON: class and message of an exception; the last frame before
                       the next RESET
    CLOSE     parent   empty
    FULL      worker   JSON as in ERROR, in place of REPLY or ENCODE: an error of that
                       step or call only
    RESET     both     int32 [1]: number of the reset; drops all steps and slots. The
                       worker answers with the same number
    ADAPTER   both     JSON: number, path, digest of an adapter to load. The worker
                       answers with {}, or with an error as in ERROR
    READ      both     empty: requests the contents of the oldest READ frame. The worker
                       answers with them
    WRITE     parent   int32: a WRITE frame; then its contents
    ENCODE    both     int32: N, N lengths, token ids, kinds of their segments. The
                       worker answers with int32 N, K, float32 [N, K], or with FULL

HELLO lists the features of a side; a worker without "block_io" is sent no READ and
WRITE, one without "encode" no ENCODE. Contents are the length of a JSON object (int32),
the object, in which the name of each part has its dtype and its shape, and the bytes of
the parts.

JSON is used for the handshake and for errors; nothing is unpickled. Payloads are
encoded and decoded in :mod:`inl.protocol.wire_json` and
:mod:`inl.protocol.wire_arrays`.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from inl.errors import ProtocolError
from inl.forks import disconnect
from inl.readiness import READABLE, WRITABLE, waiter

PROTOCOL = 4
"""Version of the wire format: of this module and the payload modules."""

MAGIC = 0x4C49
PREFIX = struct.Struct("<HHI")

MAX_BYTES = 1 << 28
"""Longest payload; masks of 512 rows and 256 thousand tokens take a sixteenth."""

MAX_TEXT = 1 << 20
"""Longest JSON payload."""

CHUNK = 1 << 16


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    OPEN = 2
    PROGRESS = 3
    READY = 4
    MESSAGE = 5
    MASKS = 6
    COLLECT = 7
    REPLY = 8
    ERROR = 9
    CLOSE = 10
    FULL = 11
    RESET = 12
    ADAPTER = 13
    READ = 14
    WRITE = 15
    CHECK = 16
    ENCODE = 17


TEXTS = frozenset(
    {
        Kind.HELLO,
        Kind.CHECK,
        Kind.OPEN,
        Kind.READY,
        Kind.ERROR,
        Kind.FULL,
        Kind.ADAPTER,
    }
)
KINDS = {kind.value: kind for kind in Kind}


class Frame(NamedTuple):
    """A received frame."""

    kind: Kind
    payload: bytearray


def read_prefix(data: bytes | bytearray) -> tuple[Kind, int]:
    """Decode a prefix: the kind of the frame and the length of its payload.

    Raises :class:`~inl.errors.ProtocolError` for an invalid prefix.
    """
    magic, number, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(
            f"wire: found {bytes(data[:8])!r} at the start of a frame, "
            f"accepts {struct.pack('<H', MAGIC)!r} first; the other side has another "
            "protocol, or something else writes to the connection"
        )
    kind = KINDS.get(number)
    if kind is None:
        raise ProtocolError(
            f"wire: found frame kind {number}, accepts 1 to {max(Kind)}"
        )
    most = MAX_TEXT if kind in TEXTS else MAX_BYTES
    if length > most:
        raise ProtocolError(
            f"wire: found {kind.name} of {length:,} bytes, accepts {most:,} at most"
        )
    return kind, length


class _Outgoing:
    """A frame that is being sent."""

    __slots__ = ("data", "sent")

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.sent: list[int] = []
        """Bytes that each call of the socket has accepted."""


class Channel:
    """One end of a connection; owns the socket. Not thread-safe.

    ``send`` does not wait: bytes that the socket does not accept are buffered and sent
    by later calls. ``send`` and ``receive`` raise EOFError once the other end is
    closed.

    An exception such as KeyboardInterrupt between any two instructions loses at most
    whole frames. Therefore the socket is called by ``list.extend``, which also stores
    the result, in one instruction.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poll = waiter()
        self._poll.register(sock, READABLE)
        self._incoming: list[bytes] = []
        """Received and not yet taken."""
        self._outgoing: deque[_Outgoing] = deque()

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._socket.fileno()

    def send(self, kind: Kind, payload: bytes | memoryview = b"") -> None:
        """Send a frame, buffering the part that would block."""
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        # Copied, since the caller may reuse its memory.
        data = PREFIX.pack(MAGIC, kind, size) + bytes(payload)
        self._outgoing.append(_Outgoing(data))
        self.flush()

    def flush(self) -> None:
        """Send buffered bytes, as far as possible without waiting."""
        while self._outgoing:
            head = self._outgoing[0]
            rest = head.data[sum(head.sent) :]
            if not rest:
                self._outgoing.popleft()
                continue
            try:
                head.sent.extend(map(self._socket.send, (rest,)))
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError("wire: the other end is closed") from error

    def receive(self, seconds: float | None = None) -> Frame | None:
        """Wait for a frame; returns ``None`` after ``seconds`` without a whole one.

        Raises :class:`~inl.errors.ProtocolError` for an invalid prefix.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while (frame := self._take()) is None:
            if not self._wait(end):
                return None
            self._read()
        return frame

    def _take(self) -> Frame | None:
        parts = self._incoming
        size = sum(map(len, parts))
        if size < PREFIX.size:
            return None
        start = parts[0] if len(parts[0]) >= PREFIX.size else b"".join(parts)
        kind, length = read_prefix(start)
        end = PREFIX.size + length
        if size < end:
            return None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._incoming = [data[end:]] if size > end else []
        return Frame(kind, bytearray(data[PREFIX.size : end]))

    def _wait(self, end: float | None) -> bool:
        """Wait until the socket is readable, sending buffered bytes; False if late."""
        while True:
            events = READABLE | (WRITABLE if self._outgoing else 0)
            self._poll.modify(self._socket, events)
            left = None if end is None else max(end - time.monotonic(), 0) * 1000
            ready = self._poll.poll(left)
            if not ready:
                return False
            if ready[0][1] & ~WRITABLE:
                return True
            self.flush()

    def _read(self) -> None:
        parts = self._incoming
        try:
            parts.extend(map(self._socket.recv, (CHUNK,)))
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError("wire: the other end is closed") from error
        if not parts[-1]:
            raise EOFError("wire: the other end is closed")

    def shutdown(self) -> None:
        """End the connection, so that a call which waits raises. Of any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def disconnect(self) -> None:
        """Leave the connection to the parent, in a forked child."""
        disconnect(self._socket.fileno())

    def close(self) -> None:
        """Close the socket; closing twice is allowed."""
        self._socket.close()
