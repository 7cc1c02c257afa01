"""Streaming clients that count bytes, and read the usage at the end of each stream."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TAIL_BYTES = 2048
"""Bytes at the end of a stream in which its usage is."""

TOKENS = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(slots=True)
class Stream:
    """What one client received."""

    tokens: int
    """Of the usage that the server reports."""
    received: int
    """Bytes, headers included."""
    reads: int


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tail = b""
        self._received = self._reads = 0

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._reads += 1
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def connection_lost(self, _: Exception | None) -> None:
        found = TOKENS.findall(self._tail)
        if b"data: [DONE]" not in self._tail or not found:
            self.done.set_exception(RuntimeError(f"stream: ended with {self._tail!r}"))
        else:
            self.done.set_result(Stream(int(found[-1]), self._received, self._reads))


async def _stream_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    address = urlsplit(url)
    loop, clients = asyncio.get_running_loop(), []
    for body in bodies:
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
            f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        client = _Client(head.encode() + data)
        clients.append(client)
        make = lambda client=client: client  # noqa: E731
        await loop.create_connection(make, address.hostname, address.port)
    return await asyncio.gather(*(client.done for client in clients))


def stream_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[Stream]:
    """Send streaming chat requests at the same time; raises for one that fails."""
    try:
        import uvloop

        return uvloop.run(_stream_all(url, bodies))
    except ImportError:
        return asyncio.run(_stream_all(url, bodies))
