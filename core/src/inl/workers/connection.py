"""Connects a worker process to its parent: by an inherited socket, or by a local port.

Windows passes no sockets to a child. There the parent listens at a port of the loopback
interface, and writes a random token to the child's standard input, which the child
sends back over its connection. That pipe also tells the child that the parent has
ended.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from inl.forks import disconnect

TOKEN_BYTES: Final = 32
CONNECT_SECONDS: Final = 120.0
"""Time for the child to start an interpreter and connect; a cold disk takes seconds."""
POLL_SECONDS: Final = 0.1
"""Interval at which an end of the child is noticed."""


class Connection(Protocol):
    """The parent's side of a connection that a child is about to open."""

    @property
    def arguments(self) -> Sequence[str]:
        """Arguments of the child."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``subprocess.Popen``."""

    def connected(self, child: subprocess.Popen[bytes]) -> socket.socket:
        """Return the connected socket; raises OSError if the child does not connect."""

    def disconnect(self) -> None:
        """Leave everything to the parent, in a forked child."""

    def close(self) -> None:
        """Close what the child needed to start. Closing twice is allowed."""


def new_connection() -> Connection:
    """Return a connection of the kind that this system has."""
    return LocalPort() if sys.platform == "win32" else InheritedSocket()


class InheritedSocket:
    """One end of a socket pair, inherited by the child as a descriptor."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        number = self._theirs.fileno()
        self.arguments = ("--fd", str(number))
        # A process group of its own: Ctrl-C in a terminal reaches only the parent.
        self.options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "pass_fds": (number,),
            "process_group": 0,
        }
        self._is_connected = False

    def connected(self, child: subprocess.Popen[bytes]) -> socket.socket:  # noqa: ARG002
        self._is_connected = True
        return self._ours

    def disconnect(self) -> None:
        """Nothing is left open but the socket, which the channel owns."""

    def close(self) -> None:
        self._theirs.close()
        if not self._is_connected:
            self._ours.close()


class LocalPort:
    """A port of the loopback interface, and a token that the child must send."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=8)
        self._listening.settimeout(POLL_SECONDS)
        self._token = secrets.token_hex(TOKEN_BYTES).encode()
        self._pipe: Any = None
        self.arguments = ("--port", str(self._listening.getsockname()[1]))
        group: int = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self.options: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "creationflags": group,
        }

    def connected(self, child: subprocess.Popen[bytes]) -> socket.socket:
        self._pipe = child.stdin
        with suppress(BrokenPipeError):  # the child has ended: reported below
            self._pipe.write(self._token + b"\n")
            self._pipe.flush()
        deadline = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                accepted, _ = self._listening.accept()
                if self._is_child(accepted):
                    return accepted
                accepted.close()
                continue
            if child.poll() is not None:
                raise OSError(f"it ended with exit status {child.returncode}")
        raise OSError(f"it did not connect within {CONNECT_SECONDS:g} s")

    def _is_child(self, accepted: socket.socket) -> bool:
        """Whether a connection begins with the token: others may connect, too."""
        accepted.settimeout(5.0)
        sent = b""
        with suppress(OSError):
            while len(sent) < len(self._token):
                part = accepted.recv(len(self._token) - len(sent))
                if not part:
                    return False
                sent += part
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return hmac.compare_digest(sent, self._token)

    def disconnect(self) -> None:
        if self._pipe is not None:
            disconnect(self._pipe.fileno())

    def close(self) -> None:
        self._listening.close()


def connect_to_parent(port: int) -> socket.socket:
    """Connect a child to the port of a :class:`LocalPort`."""
    token = sys.stdin.buffer.readline().rstrip()
    parent = socket.create_connection(("127.0.0.1", port), CONNECT_SECONDS)
    parent.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    parent.sendall(token)
    return parent
