"""How a worker proves itself to the engine that it connects to, and the engine to it.

Both know a secret of 256 bits, which is never sent::

    worker  HEAD: magic, version
    engine  GREETING: magic, version, 32 random bytes
    worker  KNOCK: role, seat, process id, worker id, 32 random bytes, and the
            HMAC-SHA256 of HEAD, GREETING and these
    engine  ANSWER: 0 or 1, seat, HMAC of HEAD, GREETING and KNOCK, length and text of
            the reason

Between hosts all of this is inside TLS, see :mod:`inl.workers.encryption`, and the
digest of the engine's certificate is part of both HMACs. A worker opens two
connections, one for frames and one for heartbeats, with the same worker id. Everything
has a length that is known before it is read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from inl.errors import DeviceError, InlError, ProtocolError
from inl.readiness import receive_exactly
from inl.workers.encryption import encrypt
from inl.workers.settings import INSECURE, is_encrypted, parse_address

VERSION = 1
"""Newest version of the handshake; both sides use the older one of theirs."""
OLDEST = 1

MAGIC = b"INLW"
GREETING = struct.Struct("<4sH32s")
HEAD = struct.Struct("<4sH")
KNOCK = struct.Struct("<BHI16s32s")
MAC_BYTES = 32
KNOCK_BYTES = KNOCK.size + MAC_BYTES
ANSWER = struct.Struct("<BH32sH")
MAX_REASON = 500
ANY_SEAT = 0xFFFF

ANSWER_SECONDS = 10.0
"""Time for the engine to answer a worker that has connected."""
RETRY_SECONDS = 0.5


class Role(IntEnum):
    """What a connection is for."""

    FRAMES = 0
    HEARTBEAT = 1


class Knock(NamedTuple):
    """What a worker says of itself."""

    role: int
    seat: int
    pid: int
    worker: bytes
    nonce: bytes


class Joined(NamedTuple):
    """The two connections between a worker and its engine."""

    frames: socket.socket
    heartbeat: socket.socket
    seat: int
    peer: str
    """Address of the other side."""
    pid: int
    """Process id of the worker, on its host."""


def greeting(version: int = VERSION) -> bytes:
    """Return a new greeting."""
    return GREETING.pack(MAGIC, version, secrets.token_bytes(32))


def mac(secret: bytes, side: bytes, said: bytes) -> bytes:
    """Return the proof of one side, "worker" or "engine".

    said: digest of the certificate, if there is one, HEAD, GREETING and KNOCK.
    """
    return hmac.digest(secret, side + said, "sha256")


def check_head(data: bytes) -> int:
    """Return the version that engine and worker use.

    Raises :class:`~inl.errors.ProtocolError` for another protocol, and for a worker
    that is too old. One that is newer decides itself.
    """
    found, version = HEAD.unpack_from(data)
    if found != MAGIC:
        raise ProtocolError("not a worker of INL")
    if version < OLDEST:
        raise ProtocolError(
            f"the worker has version {version} of the handshake, this engine "
            f"{OLDEST} to {VERSION}; install the same inl-core in both"
        )
    return min(int(version), VERSION)


def read_knock(data: bytes) -> tuple[Knock, bytes]:
    """Decode a whole knock, and its MAC."""
    return Knock._make(KNOCK.unpack_from(data)), data[KNOCK.size :]


def answer(accepted: bool, seat: int, proof: bytes, reason: str = "") -> bytes:
    """Encode the engine's answer."""
    text = reason.encode()[:MAX_REASON]
    return ANSWER.pack(accepted, seat, proof, len(text)) + text


def join(address: str, secret: bytes, seat: int, seconds: float) -> Joined:
    """Connect a worker to the engine at ``HOST:PORT``, waiting until it listens.

    seat: number of the worker, or :data:`ANY_SEAT`. Raises
    :class:`~inl.errors.DeviceError` if nothing listens for so many seconds, and
    :class:`~inl.errors.ProtocolError` with the engine's reason if it refuses.
    """
    host, port = parse_address(address)
    worker, end = secrets.token_bytes(16), time.monotonic() + seconds
    frames = _connect(host, port, address, end)
    try:
        frames, seat = _knock(frames, address, secret, Role.FRAMES, seat, worker)
        heartbeat = _connect(host, port, address, end)
        heartbeat, _ = _knock(heartbeat, address, secret, Role.HEARTBEAT, seat, worker)
    except BaseException:
        frames.close()
        raise
    return Joined(frames, heartbeat, seat, address, os.getpid())


def _connect(host: str, port: int, address: str, end: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((host, port), ANSWER_SECONDS)
            # A port connects to itself where nobody listens and it is chosen for both.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        except OSError as error:
            if time.monotonic() > end:
                raise DeviceError(
                    f"engine {address}: cannot connect: {error.strerror or error}; "
                    "start the engine first, or check the address and the firewall"
                ) from error
        time.sleep(RETRY_SECONDS)


def _knock(
    engine: socket.socket,
    address: str,
    secret: bytes,
    role: Role,
    seat: int,
    worker: bytes,
) -> tuple[socket.socket, int]:
    """Prove this worker to the engine, and check the engine's proof."""
    where = f"engine {address}"
    head, binding = HEAD.pack(MAGIC, VERSION), b""
    try:
        engine.settimeout(ANSWER_SECONDS)
        if is_encrypted(parse_address(address)[0]):
            engine, binding = encrypt(engine, time.monotonic() + ANSWER_SECONDS)
        engine.sendall(head)
        end = time.monotonic() + ANSWER_SECONDS
        greeted = receive_exactly(engine, HEAD.size, end)
        if greeted[:1] == b"\0":
            _check_answer(engine, end, greeted)
        greeted += receive_exactly(engine, GREETING.size - HEAD.size, end)
        magic, version, _ = GREETING.unpack(greeted)
        if magic != MAGIC or not OLDEST <= version <= VERSION:
            raise ProtocolError(
                f"found {greeted[:6]!r}, accepted: an engine of INL with version "
                f"{OLDEST} to {VERSION} of the handshake"
            )
        knock = KNOCK.pack(role, seat, os.getpid(), worker, secrets.token_bytes(32))
        said = binding + head + greeted + knock
        engine.sendall(knock + mac(secret, b"worker", said))
        seat, proof = _check_answer(engine, end)
        if not hmac.compare_digest(proof, mac(secret, b"engine", said)):
            raise ProtocolError("does not know the secret of this worker")
    except OSError as error:
        engine.close()
        raise ProtocolError(
            f"{where}: ended the handshake: {error.strerror or error}; it may have too "
            f"many connections, be no engine of INL, or have another {INSECURE}"
        ) from error
    except InlError as error:
        engine.close()
        raise type(error)(f"{where}: {error}") from None
    set_options(engine)
    return engine, seat


def _check_answer(
    engine: socket.socket, end: float, begun: bytes = b""
) -> tuple[int, bytes]:
    """Return the seat and the proof of an answer; raises the reason of a refusal."""
    data = begun + receive_exactly(engine, ANSWER.size - len(begun), end)
    accepted, seat, proof, length = ANSWER.unpack(data)
    text = receive_exactly(engine, min(length, MAX_REASON), end)
    reason = text.decode(errors="replace")
    if not accepted:
        raise ProtocolError(f"refused this worker: {reason}")
    return seat, proof


def set_options(sock: socket.socket) -> None:
    """Set the options of an authenticated connection."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
