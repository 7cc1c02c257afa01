"""The connection between an engine and a front-end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import msgspec

from inl.serve.frontends.messages import Message, decode, encode

if TYPE_CHECKING:
    from asyncio import Transport

log = logging.getLogger("inl.serve")

SIZE_BYTES = 4


class Link(asyncio.Protocol):
    """Sends and receives messages, each behind its size. Used by one event loop.

    receive: called with each message. lost: called once the other process has closed
    its end. resumed: called when a peer that read too slowly has caught up.
    """

    def __init__(
        self,
        receive: Callable[[Message], None],
        lost: Callable[[], None],
        resumed: Callable[[], None] = lambda: None,
    ) -> None:
        self.is_behind = False
        """Whether the peer reads more slowly than this process writes."""
        self.max_bytes = 1 << 8 * SIZE_BYTES
        """Size of the largest message that is accepted; another ends the link."""
        self.received_bytes = 0
        self._receive, self._lost, self._resumed = receive, lost, resumed
        self._transport: Transport | None = None
        self._held = bytearray()

    @classmethod
    async def open(
        cls,
        end: socket.socket,
        receive: Callable[[Message], None],
        lost: Callable[[], None],
        resumed: Callable[[], None] = lambda: None,
    ) -> Self:
        """Return the link over one end of a socket pair."""
        loop = asyncio.get_running_loop()
        make = lambda: cls(receive, lost, resumed)  # noqa: E731
        _, link = await loop.create_unix_connection(make, sock=end)
        return link

    def send(self, message: Message) -> None:
        """Send a message; nothing once the link is lost."""
        if self._transport is not None:
            data = encode(message)
            self._transport.write(len(data).to_bytes(SIZE_BYTES, "little") + data)

    @property
    def transport(self) -> Transport:
        """The transport of an open link."""
        assert self._transport is not None, "open"
        return self._transport

    def close(self) -> None:
        """Close this end."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close this end without sending what waits to be sent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        held = self._held
        held += data
        self.received_bytes += len(data)
        start = 0
        while (begin := start + SIZE_BYTES) <= len(held):
            stop = begin + int.from_bytes(held[start:begin], "little")
            if stop - begin > self.max_bytes:
                self._refuse(f"found a message of {stop - begin} bytes")
                return
            if stop > len(held):
                break
            try:
                message = decode(bytes(held[begin:stop]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._refuse(str(error))
                return
            self._receive(message)
            start = stop
        if start:
            del held[:start]

    def _refuse(self, reason: str) -> None:
        log.warning("a link to an engine or a front-end was closed: %.200s", reason)
        self._held.clear()
        self.close()

    def pause_writing(self) -> None:
        self.is_behind = True

    def resume_writing(self) -> None:
        self.is_behind = False
        self._resumed()

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self._lost()
