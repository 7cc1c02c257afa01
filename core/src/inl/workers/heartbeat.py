"""Heartbeats between an engine and a worker that it reaches by a network.

Each side sends a byte every 250 ms over a connection of its own, so that neither a long
step nor a large frame delays it. The other side is lost once it closes the connection,
once its host acknowledges nothing for a second, and once the process itself is silent
for ten: one that compiles may hold the interpreter's lock. The byte says whether the
process is stopped, where another one sends it: :mod:`inl.workers.heartbeat_process`.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from inl.forks import disconnect
from inl.readiness import READABLE, waiter
from inl.workers.process_state import STOPPED_SECONDS

BEAT_SECONDS = 0.25
HOST_SECONDS = 1.0
SILENT_SECONDS = 10.0
RUNNING, STOPPED = b"\0", b"\1"
"""What a heartbeat says of the process that it is for."""
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Heartbeat:
    """Sends and awaits heartbeats, in a thread, until the other side is lost.

    on_loss: called there with what has happened, such as "closed its connection".
    state: returns what to send. Owns the socket.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_loss: Callable[[str], None],
        *,
        state: Callable[[], bytes] = lambda: RUNNING,
    ) -> None:
        self.loss = ""
        """What has happened to the other side; empty while it lives."""
        self._socket = sock
        self._on_loss = on_loss
        self._state = state
        self._heard = RUNNING
        """What the other side has sent last."""
        self._closed = threading.Event()
        self._lost = threading.Event()
        sock.setblocking(False)
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, int(HOST_SECONDS * 1000))
        self._poll = waiter()
        self._poll.register(sock, READABLE)
        self._thread = threading.Thread(
            target=self._run, name="inl-heartbeat", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        heard = running = time.monotonic()
        while not self._closed.is_set():
            try:
                self._check()
                self._send()
                if self._poll.poll(BEAT_SECONDS * 1000):
                    self._receive()
                    heard = time.monotonic()
                    # Two sides that answer each other at once would not pause.
                    self._closed.wait(BEAT_SECONDS)
            except OSError as error:
                self._lose(_reason(error))
                break
            now = time.monotonic()
            if self._heard != STOPPED:
                running = now
            elif now - running > STOPPED_SECONDS:
                self._lose("was stopped by a signal")
                break
            if now - heard > SILENT_SECONDS:
                self._lose(f"was silent for {SILENT_SECONDS:g} s")
                break
        self._socket.close()

    def _send(self) -> None:
        with suppress(BlockingIOError):
            self._socket.send(self._state())

    def _check(self) -> None:
        """Raise the error of the connection; TLS would report it as an end."""
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))

    def _receive(self) -> None:
        self._check()
        with suppress(BlockingIOError):
            received = self._socket.recv(4096)
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "closed")
            self._heard = received[-1:]

    def _lose(self, reason: str) -> None:
        if not self._closed.is_set():
            self.loss = reason
            self._lost.set()
            self._on_loss(reason)

    def wait(self, seconds: float | None = None) -> str:
        """Wait until the other side is lost; returns what has happened to it."""
        self._lost.wait(seconds)
        return self.loss

    def disconnect(self) -> None:
        """Leave the connection to the parent, in a forked child."""
        disconnect(self._socket.fileno())

    def close(self) -> None:
        """End the heartbeats, as the other side notices. Closing twice is allowed."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def _reason(error: OSError) -> str:
    if error.errno in UNREACHABLE:
        return f"its host answered nothing for {HOST_SECONDS:g} s"
    return "closed its connection"
