"""How an engine and a front-end of another process prove that they know a secret.

Both send :class:`~inl.serve.frontends.messages.Hello` with random bytes, the front-end
first, and then HMACs of both, as workers do (:mod:`inl.workers.handshake`). Between
hosts all of this is inside TLS, and the digest of the engine's certificate is part of
both HMACs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Any

from inl.errors import DeviceError
from inl.serve.frontends.messages import Hello
from inl.workers.handshake import mac
from inl.workers.settings import MAKE_SECRET, SECRET, SECRET_FILE, is_encrypted

if TYPE_CHECKING:
    import asyncio

VERSION = 2
"""Newest version of the messages; both sides use the older one of theirs."""

TELLS_PREFIXES = 2
"""First version in which engines publish their cached prompt blocks."""

OLDEST = 1

NONCE_BYTES = 32

NO_SECRET = bytes(32)
"""Used on the loopback interface if there is none, which like HTTP there is open to all
programs of this machine."""


def new_hello() -> Hello:
    """Return a first message."""
    return Hello(VERSION, secrets.token_bytes(NONCE_BYTES))


def version_problem(hello: Hello) -> str | None:
    """Return why the other side's version cannot be used."""
    if hello.version >= OLDEST and len(hello.nonce) == NONCE_BYTES:
        return None
    return (
        f"found version {hello.version} of the messages, accepts {OLDEST} to "
        f"{VERSION}; install the same inl-core in both"
    )


def proof(
    secret: bytes, side: bytes, frontend: Hello, engine: Hello, binding: bytes
) -> bytes:
    """Return the proof of one side, "frontend" or "engine".

    binding: digest of the certificate of the connection; empty without one.
    """
    said = b"".join(
        (binding, frontend.nonce, engine.nonce)
        + tuple(each.version.to_bytes(4, "little") for each in (frontend, engine))
    )
    return mac(secret, side, said)


is_equal = hmac.compare_digest


def binding_of(transport: asyncio.BaseTransport) -> bytes:
    """Return the digest of the certificate that a front-end sees; empty without TLS."""
    encrypted: Any = transport.get_extra_info("ssl_object")
    if encrypted is None:
        return b""
    return hashlib.sha256(encrypted.getpeercert(binary_form=True)).digest()


def usable_secret(secret: bytes | None, host: str) -> bytes:
    """Return the secret of links with a host.

    Raises :class:`~inl.errors.DeviceError` if there is none and the host is not this
    one.
    """
    if secret is not None:
        return secret
    if is_encrypted(host):
        raise DeviceError(
            f"{host}: found no secret, by which engine and front-end know each other; "
            f"set {SECRET_FILE} to a private file, or {SECRET}, here and there; "
            f"{MAKE_SECRET}"
        )
    return NO_SECRET
