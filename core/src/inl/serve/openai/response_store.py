"""Responses that later ones continue: in memory, bounded, by key."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple, Protocol

from inl.serve.api_error import ApiError
from inl.serve.settings import ServerConfig


class StoresResponses(Protocol):
    """Stored responses, in this process or another one."""

    async def put(self, client: str, name: str, data: bytes) -> None:
        """Store a response of a client."""

    async def get(self, client: str, name: str) -> bytes:
        """Return a response of a client; raises :class:`ApiError` 404."""


class _Entry(NamedTuple):
    data: bytes
    ends: float
    """When it is forgotten, as ``time.monotonic()``."""


class ResponseStore:
    """Stored responses of this process. Used by the event loop only.

    Of the client with the most bytes, or where there are too many of the one with the
    most responses, the oldest is forgotten first, so that no client takes the room of
    others. count, max_bytes: of all clients together. seconds: after
    which a response is forgotten.
    """

    def __init__(self, *, count: int, max_bytes: int, seconds: float) -> None:
        self._count, self._max_bytes, self._seconds = count, max_bytes, seconds
        self._entries: dict[str, OrderedDict[str, _Entry]] = {}
        self._bytes: dict[str, int] = {}
        """Bytes of each client that has entries."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all responses."""
        return sum(self._bytes.values())

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    async def put(self, client: str, name: str, data: bytes) -> None:
        """Store a response of a client; one that is too large is left out."""
        self._expire()
        if len(data) > self._max_bytes or not self._count:
            return
        entries = self._entries.setdefault(client, OrderedDict())
        if (before := entries.pop(name, None)) is not None:  # its stream was resumed
            self._bytes[client] -= len(before.data)
        entries[name] = _Entry(data, time.monotonic() + self._seconds)
        self._bytes[client] = self._bytes.get(client, 0) + len(data)
        while self.total_bytes > self._max_bytes:
            self._forget_of(max(self._bytes, key=self._bytes.__getitem__))
        while len(self) > self._count:
            self._forget_of(
                max(self._entries, key=lambda each: len(self._entries[each]))
            )

    async def get(self, client: str, name: str) -> bytes:
        """Return a response of a client; raises :class:`ApiError` 404."""
        return self._find(client, name).data

    def delete(self, client: str, name: str) -> None:
        """Forget a response of a client; raises :class:`ApiError` 404."""
        self._find(client, name)
        self._remove(client, name)

    def _find(self, client: str, name: str) -> _Entry:
        self._expire()
        entries = self._entries.get(client)
        entry = None if entries is None else entries.get(name)
        if entry is None:
            raise ApiError(
                404,
                f"response: found no stored response {name!r:.80}; {self._count} are "
                f"kept for {self._seconds:g} s, of {self._max_bytes} bytes together "
                "(--stored-responses)",
                param="previous_response_id",
                code="response_not_found",
            )
        return entry

    def _remove(self, client: str, name: str) -> None:
        self._bytes[client] -= len(self._entries[client].pop(name).data)
        if not self._entries[client]:
            del self._entries[client], self._bytes[client]

    def _forget_of(self, client: str) -> None:
        """Forget the oldest response of a client."""
        self._remove(client, next(iter(self._entries[client])))

    def _expire(self) -> None:
        """Forget what has ended: the oldest of each client come first."""
        now = time.monotonic()
        for client, entries in [*self._entries.items()]:
            ended = [name for name, each in entries.items() if each.ends <= now]
            for name in ended:
                self._remove(client, name)


def response_store(config: ServerConfig) -> ResponseStore | None:
    """Return the stored responses; ``None`` if the server stores none."""
    if not config.stored_responses:
        return None
    return ResponseStore(
        count=config.stored_responses,
        max_bytes=config.stored_response_bytes,
        seconds=config.stored_response_seconds,
    )
