"""Listens for other engines, one connection for each ticket."""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from functools import partial

from inl.errors import DeviceError, InlError, ProtocolError
from inl.kv_transfer.link import HELLO_SECONDS, Link, accept, link_secret
from inl.workers.encryption import Certificate, new_certificate, shake_hands
from inl.workers.listener import TLS_RECORD
from inl.workers.settings import INSECURE, is_encrypted, parse_address, show_address

log = logging.getLogger("inl")

MAX_LINKS = 256
"""Open connections; one more is closed."""
PAUSE_SECONDS = 0.01
"""Time after which a connection is accepted again, such as with too many files."""


class LinkPort(ABC):
    """Serves the links of other engines, each on a thread.

    address: at which it listens. Raises :class:`~inl.errors.DeviceError` for one that
    cannot be used.
    """

    def __init__(self, address: str, secret: bytes | None, field: str) -> None:
        host, port = parse_address(address, field)
        self._secret = link_secret(secret, host)
        self._certificate: Certificate | None = None
        if is_encrypted(host):
            self._certificate = new_certificate()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise DeviceError(
                f"{field} {address}: {error.strerror}; accepted: an "
                "address of this host with a free port, 0 for any"
            ) from error
        self.address = show_address(host, self._listening.getsockname()[1])
        self.counts: Counter[str] = Counter()
        """Tickets by what became of them."""
        self._links = 0
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="inl-links", daemon=True).start()

    def close(self) -> None:
        """Stop listening; open tickets end. Closing twice is allowed."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                if not self._closed:
                    time.sleep(PAUSE_SECONDS)  # too many open files
                continue
            with self._lock:
                is_full = self._links >= MAX_LINKS
                self._links += not is_full
            if is_full:
                sock.close()
                continue
            serve = partial(self._serve, sock)
            threading.Thread(target=serve, name="inl-link", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock, binding = self._encrypted(sock)
            end = time.monotonic() + HELLO_SECONDS
            self._serve_link(accept(sock, self._secret, binding, end))
        except (OSError, InlError) as error:
            self._count("failed")
            log.info("a ticket of another engine has ended: %s", error)
        finally:
            sock.close()
            with self._lock:
                self._links -= 1

    def _encrypted(self, sock: socket.socket) -> tuple[socket.socket, bytes]:
        """Begin TLS with an engine of another host; returns the certificate's digest.

        One of this host sends plain bytes, whatever address the port listens at.
        """
        sock.settimeout(HELLO_SECONDS)
        first = sock.recv(1, socket.MSG_PEEK)
        if self._certificate is not None and first == TLS_RECORD:
            encrypted = self._certificate.context.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
            try:
                shake_hands(encrypted, time.monotonic() + HELLO_SECONDS)
            except BaseException:
                encrypted.close()
                raise
            return encrypted, self._certificate.digest
        if is_encrypted(sock.getpeername()[0]):
            raise ProtocolError(
                f"ticket: found no TLS, accepts engines of other hosts with it; unset "
                f"{INSECURE} there, or set it in both, in a network of trusted hosts "
                "only"
            )
        return sock, b""

    def _count(self, name: str, value: int = 1) -> None:
        with self._lock:
            self.counts[name] += value

    @abstractmethod
    def _serve_link(self, link: Link) -> None:
        """Serve one ticket; raises OSError and :class:`~inl.errors.InlError`."""
