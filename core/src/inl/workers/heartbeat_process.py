"""Heartbeats of a worker from a process beside it, which tells when it is stopped."""

from __future__ import annotations

import os
import signal
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from inl.workers.heartbeat import BEAT_SECONDS, RUNNING, STOPPED, Heartbeat
from inl.workers.process_state import is_stopped

DESCRIPTORS = Path("/proc/self/fd")


class HeartbeatProcess:
    """A forked child that sends and awaits the heartbeats of this process.

    It goes on while this process is stopped, or holds the interpreter's lock, and says
    which; it ends with this process. on_loss: called by :meth:`wait` once the other
    side is lost. Takes the socket over. Only where the system has /proc; create it
    before threads and devices.
    """

    def __init__(self, sock: socket.socket, on_loss: Callable[[str], None]) -> None:
        self._on_loss = on_loss
        self._reading, writing = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # A thread of NumPy's products may run; the child computes none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if not self._child:
            _beat(sock, writing, parent)
        os.close(writing)
        sock.close()

    def wait(self) -> str:
        """Wait until the other side is lost; returns what has happened to it."""
        reason = b""
        while part := os.read(self._reading, 4096):
            reason += part
        loss = reason.decode() or "is out of reach: the process for heartbeats ended"
        self._on_loss(loss)
        return loss

    def close(self) -> None:
        """End the heartbeats, as the other side notices. Closing twice is allowed."""
        if self._child:
            with suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0


def start_heartbeat(
    sock: socket.socket, on_loss: Callable[[str], None]
) -> Heartbeat | HeartbeatProcess:
    """Return heartbeats of a process of their own, where the system has its files."""
    kind = HeartbeatProcess if DESCRIPTORS.exists() else Heartbeat
    return kind(sock, on_loss)


def _beat(sock: socket.socket, writing: int, parent: int) -> NoReturn:
    """Serve in the child; keeps none of the parent's other descriptors open."""
    try:
        os.setpgid(0, 0)  # Ctrl-Z and Ctrl-C of a terminal are for the parent
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for each in range(3):
            os.dup2(null, each)
        for each in [int(path.name) for path in DESCRIPTORS.iterdir()]:
            if each > 2 and each not in (sock.fileno(), writing):
                with suppress(OSError):
                    os.close(each)
        heartbeat = Heartbeat(
            sock,
            lambda _: None,
            state=lambda: STOPPED if is_stopped(parent) else RUNNING,
        )
        while os.getppid() == parent:
            if loss := heartbeat.wait(BEAT_SECONDS):
                os.write(writing, loss.encode())
                break
    finally:
        os._exit(0)
