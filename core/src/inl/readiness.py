"""Waiting for files: ``poll``, or ``select`` on Windows, which has no ``poll``.

Also receiving with one time limit for all parts.
"""

from __future__ import annotations

import select
import socket
import time
from typing import IO, Any, Final, Protocol

READABLE: Final = 1
"""Of an event: can be read, or is closed at the other end. Also POLLIN."""
WRITABLE: Final = 4
"""Of an event: can be written. Also POLLOUT."""


File = socket.socket | IO[Any]
"""On Windows a socket."""


class Waiter(Protocol):
    """Waits for events of the registered files."""

    def register(self, file: File, events: int, /) -> None: ...
    def modify(self, file: File, events: int, /) -> None: ...
    def poll(self, milliseconds: float | None, /) -> list[tuple[int, int]]:
        """Return pairs of a descriptor and its events; none after the time limit."""


def waiter() -> Waiter:
    """Return a new object that waits for files."""
    return select.poll() if hasattr(select, "poll") else SelectWaiter()


class SelectWaiter:
    """The interface of ``select.poll`` by ``select.select``."""

    def __init__(self) -> None:
        self._events: dict[File, int] = {}

    def register(self, file: File, events: int, /) -> None:
        self._events[file] = events

    modify = register

    def poll(self, milliseconds: float | None, /) -> list[tuple[int, int]]:
        seconds = None if milliseconds is None else milliseconds / 1000
        reading = [each for each, events in self._events.items() if events & READABLE]
        writing = [each for each, events in self._events.items() if events & WRITABLE]
        readable, writable, _ = select.select(reading, writing, [], seconds)
        return [
            (
                each.fileno(),
                READABLE * (each in readable) | WRITABLE * (each in writable),
            )
            for each in self._events
            if each in readable or each in writable
        ]


def receive_exactly(sock: socket.socket, count: int, end: float) -> bytes:
    """Receive ``count`` bytes until ``end``, a ``monotonic()`` time.

    Raises OSError: TimeoutError after ``end``, also for a side that sends slowly.
    """
    data = b""
    while len(data) < count:
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError(f"received {len(data)} of {count} bytes in time")
        sock.settimeout(seconds)
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the connection was closed")
        data += part
    return data
