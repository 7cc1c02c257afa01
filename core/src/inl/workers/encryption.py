"""TLS between engines and workers of several hosts.

Nobody needs to trust the engine's certificate: both proofs of the handshake contain its
digest, so whoever is between the two, with a certificate of its own, is refused.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from inl.errors import DeviceError
from inl.readiness import READABLE, WRITABLE, waiter
from inl.workers.settings import CERTIFICATE, INSECURE

MAKE = (
    "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
    "ec_paramgen_curve:prime256v1", "-nodes", "-days", "365", "-subj", "/CN=inl",
)  # fmt: skip
MAKE_SECONDS = 30.0


class TlsSocket(ssl.SSLSocket):
    """A socket whose calls without data raise BlockingIOError, as a plain one's do.

    A record has at most 16 KiB, and OpenSSL reads one at a time: whoever receives at
    least as much can wait for the descriptor.
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive up to ``buflen`` bytes."""
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def send(self, data: Any, flags: int = 0) -> int:
        """Send, and return the number of bytes."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


class Certificate(NamedTuple):
    """The engine's side of TLS."""

    context: ssl.SSLContext
    digest: bytes


def new_certificate() -> Certificate:
    """Return the certificate that INL_WORKER_CERTIFICATE names, or one for this run.

    Raises :class:`~inl.errors.DeviceError`.
    """
    name = os.environ.get(CERTIFICATE)
    try:
        if name is not None:
            return _load(Path(name))
        with tempfile.TemporaryDirectory(prefix="inl-tls-") as folder:
            path = Path(folder) / "both.pem"
            subprocess.run(
                [*MAKE, "-keyout", path, "-out", path.with_suffix(".crt")],
                check=True, capture_output=True, timeout=MAKE_SECONDS,
            )  # fmt: skip
            with path.open("a") as file:
                file.write(path.with_suffix(".crt").read_text())
            return _load(path)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"certificate for workers of other hosts: {error}; accepted: the program "
            f"openssl, {CERTIFICATE}=FILE with a key and a certificate in PEM, or "
            f"{INSECURE}=1 without encryption in a network of trusted hosts only"
        ) from error


def _load(path: Path) -> Certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Without a password, OpenSSL would ask the terminal for that of an encrypted key.
    context.load_cert_chain(path, password="")
    context.num_tickets = 0
    context.sslsocket_class = TlsSocket
    _, _, rest = path.read_text("ascii").partition("-----BEGIN CERTIFICATE")
    first, mark, _ = rest.partition("-----END CERTIFICATE-----")
    pem = f"-----BEGIN CERTIFICATE{first}{mark}"
    return Certificate(context, _digest(ssl.PEM_cert_to_DER_cert(pem)))


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def shake_hands(sock: ssl.SSLSocket, end: float) -> None:
    """Establish TLS until ``end``, a ``monotonic()`` time, however slow the peer is.

    Raises OSError, TimeoutError after ``end``. The time limit of a socket is that of
    each of its calls: of a peer that sends byte by byte, it has no end.
    """
    sock.setblocking(False)
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            wanted = READABLE
        except ssl.SSLWantWriteError:
            wanted = WRITABLE
        left = end - time.monotonic()
        poll = waiter()
        poll.register(sock, wanted)
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError("TLS was not established in time")


def encrypt(sock: socket.socket, end: float) -> tuple[socket.socket, bytes]:
    """Begin TLS with an engine until ``end``, a ``monotonic()`` time.

    Returns the socket, with the time limit that it had, and the digest of the engine's
    certificate. Raises OSError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The handshake that follows proves the certificate.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.sslsocket_class = TlsSocket
    limit = sock.gettimeout()
    encrypted = context.wrap_socket(sock, do_handshake_on_connect=False)
    try:
        shake_hands(encrypted, end)
        encrypted.settimeout(limit)
        certificate = encrypted.getpeercert(binary_form=True)
        if certificate is None:
            raise ssl.SSLError("found no certificate")
    except BaseException:
        encrypted.close()
        raise
    return encrypted, _digest(certificate)
