"""How a worker proves itself to the engine that it connects to, and the engine to it.

Both know a secret of 256 bits, which is never sent::

    engine  GREETING: magic, version, 32 random bytes
    worker  KNOCK: magic, version, role, seat, process id, worker id, 32 random bytes,
            and the HMAC-SHA256 of GREETING and of these
    engine  ANSWER: 0 or 1, seat, HMAC of GREETING and KNOCK, length and text of the
            reason

A worker opens two connections, one for frames and one for heartbeats, with the same
worker id. Everything has a length that is known before it is read.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from inl.errors import DeviceError, InlError, ProtocolError

VERSION = 1
"""Newest version of the handshake; both sides use the older one of theirs."""
OLDEST = 1

MAGIC = b"INLW"
GREETING = struct.Struct("<4sH32s")
HEAD = struct.Struct("<4sH")
KNOCK = struct.Struct("<4sHBHI16s32s")
MAC_BYTES = 32
KNOCK_BYTES = KNOCK.size + MAC_BYTES
ANSWER = struct.Struct("<BH32sH")
MAX_REASON = 500
ANY_SEAT = 0xFFFF

ANSWER_SECONDS = 10.0
"""Time for the engine to answer a worker that has connected."""
RETRY_SECONDS = 0.5

SECRET = "INL_WORKER_SECRET"
SECRET_FILE = "INL_WORKER_SECRET_FILE"
ADDRESS = "INL_WORKER_ADDRESS"
SEAT = "INL_WORKER_SEAT"
INSECURE = "INL_WORKER_INSECURE"
MAKE_SECRET = "a new one: (umask 077; openssl rand -hex 32 > FILE)"


class Role(IntEnum):
    """What a connection is for."""

    FRAMES = 0
    HEARTBEAT = 1


class Knock(NamedTuple):
    """What a worker says of itself."""

    magic: bytes
    version: int
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


def read_secret(settings: Mapping[str, str]) -> bytes | None:
    """Return the secret that environment variables hold or name; ``None`` without one.

    Raises :class:`~inl.errors.DeviceError` for a file that others may read, and for
    anything but 64 hexadecimal digits.
    """
    text, where = settings.get(SECRET), SECRET
    if text is None:
        name = settings.get(SECRET_FILE)
        if name is None:
            return None
        text, where = _read_private(Path(name)), name
    text = text.strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != 32 or len(text) != 64:
        # The text is not shown: it may be a secret.
        raise DeviceError(
            f"{where}: found {len(text)} characters, accepted: 64 hexadecimal digits; "
            f"{MAKE_SECRET}"
        )
    return secret


def _read_private(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024).decode("ascii", "replace")
    except OSError as error:
        raise DeviceError(
            f"{path}: the secret of workers cannot be read: {error.strerror}; "
            f"{MAKE_SECRET}"
        ) from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DeviceError(
            f"{path}: other users may read the secret of workers; try: chmod 600 {path}"
        )
    return text


def parse_address(text: str, where: str = "address") -> tuple[str, int]:
    """Parse ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises :class:`~inl.errors.DeviceError`.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isdecimal() and port.isascii() and int(port) < 1 << 16):
        raise DeviceError(
            f"{where}: found {text!r:.120}, accepted: HOST:PORT such as 10.0.0.1:7000"
        )
    return host, int(port)


def show_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_reach(host: str, where: str) -> None:
    """Raise :class:`~inl.errors.DeviceError` for a host beyond this one.

    Unless the user has said that its network may be trusted: what is sent is not
    encrypted.
    """
    if os.environ.get(INSECURE, "0") in ("", "0") and not _is_loopback(host):
        raise DeviceError(
            f"{where}: found the host {host}, and what is sent to other hosts is "
            "neither encrypted nor protected from changes; accepted: 127.0.0.1, "
            f"a tunnel that ends there (ssh -L), or {INSECURE}=1 in a network of "
            "trusted hosts only"
        )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DeviceError(f"host {host}: {error.strerror}") from error
    addresses = {str(each[4][0]).partition("%")[0] for each in found}
    return all(ipaddress.ip_address(each).is_loopback for each in addresses)


def greeting() -> bytes:
    """Return a new greeting of this version."""
    return GREETING.pack(MAGIC, VERSION, secrets.token_bytes(32))


def mac(secret: bytes, side: bytes, *parts: bytes) -> bytes:
    """Return the proof of one side."""
    return hmac.digest(secret, side + b"".join(parts), "sha256")


def check_head(data: bytes) -> None:
    """Raise ``ProtocolError`` for the beginning of another protocol or version."""
    found, version = HEAD.unpack_from(data)
    if found != MAGIC:
        raise ProtocolError("not a worker of INL")
    if not OLDEST <= version <= VERSION:
        raise ProtocolError(
            f"the worker has version {version} of the handshake, this engine "
            f"{OLDEST} to {VERSION}; install the same inl-core in both"
        )


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
    check_reach(host, address)
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
            return socket.create_connection((host, port), ANSWER_SECONDS)
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
    try:
        engine.settimeout(ANSWER_SECONDS)
        greeted = _receive(engine, GREETING.size)
        magic, version, _ = GREETING.unpack(greeted)
        if magic != MAGIC or version < OLDEST:
            raise ProtocolError(
                f"{where}: found {greeted[:6]!r}, accepted: an engine of INL with a "
                f"handshake of version {OLDEST} or later"
            )
        knock = KNOCK.pack(
            MAGIC, min(version, VERSION), role, seat, os.getpid(), worker,
            secrets.token_bytes(32),
        )  # fmt: skip
        engine.sendall(knock + mac(secret, b"worker", greeted, knock))
        accepted, seat, proof, length = ANSWER.unpack(_receive(engine, ANSWER.size))
        reason = _receive(engine, min(length, MAX_REASON)).decode(errors="replace")
        if not accepted:
            raise ProtocolError(f"{where}: refused this worker: {reason}")
        if not hmac.compare_digest(proof, mac(secret, b"engine", greeted, knock)):
            raise ProtocolError(f"{where}: does not know the secret of this worker")
    except OSError as error:
        engine.close()
        raise ProtocolError(
            f"{where}: ended the handshake: {error.strerror or error}; it may have "
            "too many connections, or is no engine of INL"
        ) from error
    except InlError:
        engine.close()
        raise
    set_options(engine)
    return engine, seat


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


def set_options(sock: socket.socket) -> None:
    """Set the options of an authenticated connection."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
