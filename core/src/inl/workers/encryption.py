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
from pathlib import Path
from typing import Any, NamedTuple

from inl.errors import DeviceError
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


def encrypt(sock: socket.socket) -> tuple[socket.socket, bytes]:
    """Begin TLS with an engine; returns the socket and its certificate's digest.

    Raises OSError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The handshake that follows proves the certificate.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.sslsocket_class = TlsSocket
    encrypted = context.wrap_socket(sock)
    certificate = encrypted.getpeercert(binary_form=True)
    if certificate is None:
        encrypted.close()
        raise ssl.SSLError("found no certificate")
    return encrypted, _digest(certificate)
