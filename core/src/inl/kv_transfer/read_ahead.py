"""Reads the next message of a link while the one before is used."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from inl.kv_transfer.link import Kind

if TYPE_CHECKING:
    from inl.kv_transfer.link import Link, Memory, Message, Sealed

LAST = Kind.DONE, Kind.REFUSED
"""Kinds after which nothing is read."""

MEMORIES = 2


class ReadAhead:
    """Context that receives the messages of one ticket on a thread of its own.

    It has the memory of two messages, so contents of one are valid until the next one
    is received. Nothing is sent over the link meanwhile. Its end ends the connection.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._read: SimpleQueue[Sealed | Exception] = SimpleQueue()
        self._free: SimpleQueue[Memory | None] = SimpleQueue()
        for _ in range(MEMORIES):
            self._free.put(None)
        self._used: Sealed | None = None
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name="inl-read-ahead", daemon=True
        )

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._free.put(None)
        self._link.shut_down()
        self._thread.join()

    def receive(self) -> Message:
        """Wait for a message; raises as :meth:`Link.receive`."""
        if self._used is not None:
            self._free.put(self._used.memory)
            self._used = None
        found = self._read.get()
        if isinstance(found, Exception):
            raise found
        self._used = found
        return self._link.opened(found)

    def _run(self) -> None:
        try:
            while not self._closed:
                memory = self._free.get()
                found = self._link.read_sealed(memory)
                self._read.put(found)
                if found.kind in LAST:
                    return
        except Exception as error:
            self._read.put(error)
