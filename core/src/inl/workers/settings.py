"""Environment variables of engines and workers that connect over TCP; addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from inl.errors import DeviceError

SECRET = "INL_WORKER_SECRET"
SECRET_FILE = "INL_WORKER_SECRET_FILE"
ADDRESS = "INL_WORKER_ADDRESS"
SEAT = "INL_WORKER_SEAT"
DEVICE = "INL_WORKER_DEVICE"
"""Device that a worker computes on, instead of the one that the engine names."""
MAX_SEATS = 65535
INSECURE = "INL_WORKER_INSECURE"
CERTIFICATE = "INL_WORKER_CERTIFICATE"
MAKE_SECRET = "a new one: (umask 077; openssl rand -hex 32 > FILE)"


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


def is_encrypted(host: str) -> bool:
    """Whether connections to and from a host are encrypted: unless it is this one.

    Or the user has said that its network may be trusted. Raises
    :class:`~inl.errors.DeviceError` for a host that is not known.
    """
    return os.environ.get(INSECURE, "0") in ("", "0") and not _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DeviceError(f"host {host}: {error.strerror}") from error
    addresses = {str(each[4][0]).partition("%")[0] for each in found}
    return all(ipaddress.ip_address(each).is_loopback for each in addresses)
