"""HTTP connections whose number, messages and waits have limits."""

from __future__ import annotations

import asyncio
import http
import logging
import socket
import struct
import sys
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)

from inl.serve.api_error import ApiError
from inl.serve.event_stream import encode
from inl.serve.settings import BYTES_PER_SECOND, ServerConfig
from inl.serve.turns import Turns

log = logging.getLogger("inl.serve")

NO_LINGER = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)
"""Value of SO_LINGER that resets a connection when it is closed."""

MAX_HEADERS = 128
"""Header lines of a request."""

MAX_PIPELINED = 64
"""Requests that a connection may send before the answer of an earlier one."""

FRAMING_PER_BYTE = 8
"""Bytes that a chunked body may have beside each byte of its content."""

PARSED_BYTES = 8 << 10
"""Bytes of a connection that are parsed before the event loop does other work: small
chunks cost hundreds of times what their bytes are worth."""

READ_BYTES = 32 << 10
"""Bytes that are read at once: each connection may hold as many, and asyncio's own
number, 256 KiB, of every sender make a pass of the event loop long."""

NOTHING = memoryview(b"")

HEAD_END = b"\r\n\r\n"

FIRST_BYTES = 4 << 10
"""As ``PARSED_BYTES``, until the head of a message has been checked."""

BODY_BYTES = 8 << 10
"""Bytes of a body for which its request's task is woken before its end: a task that is
woken by each of a slow client's bytes takes the event loop many times what they do."""

DRAIN_BYTES = 256 << 10
"""Bytes of a message that are read and dropped after it was answered."""

READ_PER_PARSED = 8
"""Bytes that are read and dropped in the time in which one is parsed."""

DRAIN_SECONDS = 2.0
"""Time in which a client may read an answer that came before its message's end."""

MAX_DRAINING = 256
"""Connections that have this time; of more, those that have had most of it end."""

WARNING_SECONDS = 60.0
"""Least time between two log lines about refused connections."""


class Connections:
    """All connections of a server: their limit, and those that can be closed first.

    limit: connections that are open at the same time.
    """

    def __init__(self, config: ServerConfig, limit: int) -> None:
        self.config = config
        self.limit = limit
        self.idle: dict[Connection, None] = {}
        """Connections without a request, the one that is idle longest first."""
        self.draining: dict[Connection, None] = {}
        """Those that were answered before their message's end, the oldest first."""
        self.count = 0
        """Open connections."""
        self.turns = Turns()
        self._refused = 0
        self._next_warning = 0.0

    def add(self, connection: Connection) -> bool:
        """Count a connection; return whether there is room for it.

        At the limit, the connection that is idle longest is closed in its favor.
        """
        self.count += 1
        if self.count > self.limit:
            self._warn()
            if not self.idle:
                return False
            next(iter(self.idle)).evict()
        self.idle[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Count a connection as closed. Removing it twice is allowed."""
        self.idle.pop(connection, None)
        self.draining.pop(connection, None)
        if connection.is_counted:
            connection.is_counted = False
            self.count -= 1

    def drain(self, connection: Connection) -> None:
        """Let a client read its answer while it sends on, unless too many do."""
        self.draining[connection] = None
        if len(self.draining) > MAX_DRAINING:
            next(iter(self.draining)).evict()

    def _warn(self) -> None:
        self._refused += 1
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARNING_SECONDS
            log.warning(
                "connections: %d are open, accepts %d (--max-connections); %d idle or "
                "new ones were closed so far",
                self.count - 1, self.limit, self._refused,
            )  # fmt: skip


class Connection(HttpToolsProtocol):
    """One connection: bounds what uvicorn's protocol does not.

    - The head of a message, its trailers and the framing of its chunks have a limit in
      bytes and lines, and the head arrives within ``receive_seconds``.
    - A client that takes none of an answer for ``send_seconds`` is disconnected.
    - A message that was answered before its end is not read to its end.

    The time and the size of bodies are bounded by the gate.
    """

    _raw: asyncio.Transport

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.is_counted = True
        self._connections = connections
        self._turns = connections.turns
        self._config = connections.config
        self._timer: asyncio.TimerHandle | None = None
        """Ends the wait for a head, or for the end of the connection."""
        self._send_timer: asyncio.TimerHandle | None = None
        self._error: ApiError | None = None
        """What the parser's error was caused by."""
        self._has_begun = False
        """Whether a message has begun in the data that is parsed."""
        self._in_head = True
        """Whether the head of the next message is not complete."""
        self._in_message = False
        self._keeps_alive = True
        self._is_draining = False
        self._unanswered: deque[RequestResponseCycle] = deque()
        """The request that is being answered, and those that wait behind it."""
        self.held = NOTHING
        """What has arrived and is not parsed yet; no more is read meanwhile."""
        self._header_count = 0
        self._overhead = 0
        """Bytes of the message that are no content of its body."""
        self._allowed = 0
        """What ``_overhead`` may be."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop are no subclass, but have all of its methods.
        self._raw = raw = cast("asyncio.Transport", transport)
        if hasattr(raw, "max_size"):  # not of uvloop, nor of TLS
            raw.max_size = READ_BYTES
        super().connection_made(cast("asyncio.Transport", _Transport(self, raw)))
        self._allowed = self._config.max_header_bytes
        if self._connections.add(self):
            self._expect_head()
            return
        self._refuse(
            ApiError(
                503,
                f"connections: this server accepts {self._connections.limit} at the "
                "same time (--max-connections); try again later",
                code="too_many_connections",
                retry_after=1,
            ),
            drains=False,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._cancel_timer()
        self._cancel_send_timer()
        if not self._unanswered:
            super().connection_lost(exc)
            return
        # Many clients may leave at once, whose requests end then.
        self._turns.add(partial(self._end_requests, exc))

    def _end_requests(self, exc: Exception | None) -> int:
        self._disconnect()
        super().connection_lost(exc)
        return 0

    def _disconnect(self) -> None:
        """Mark all requests as disconnected; uvicorn marks only the last one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()
        for cycle, _ in self.pipeline:
            cycle.on_response = _ignore  # it never begins, and refers to this
        self.pipeline.clear()

    def _abort(self) -> None:
        self._disconnect()
        self._raw.abort()

    def end_answers(self) -> None:
        """Close the connection if an answer has begun, which cannot be finished."""
        if any(cycle.response_started for cycle in self._unanswered):
            self._abort()

    def evict(self) -> None:
        """Close the connection, which no request needs, in favor of another one."""
        self._connections.remove(self)
        self._raw.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_draining:
            self._overhead += len(data)
            self._raw.pause_reading()
            if self._overhead <= DRAIN_BYTES:
                size = len(data) // READ_PER_PARSED
                self._turns.add(partial(self._drain_on, size), is_urgent=False)
            return
        fits = not self.held and len(data) <= self._parsed_bytes
        if fits and self._turns.takes(len(data)):
            self._parse(data)
            return
        if not self.held:
            self._raw.pause_reading()
            self._turns.add(self._parse_held, is_urgent=self._in_head)
        # Not copied, but for TLS, which may have decrypted more before it pauses.
        self.held = memoryview(bytes(self.held) + data if self.held else data)

    def _drain_on(self, size: int) -> int:
        if not self._raw.is_closing():
            self._raw.resume_reading()
        return size

    def _parse_held(self) -> int:
        size = self._parsed_bytes
        if self._in_head:
            # What follows is parsed once the request was accepted, or answered.
            end = bytes(self.held[:size]).find(HEAD_END)
            size = size if end < 0 else end + len(HEAD_END)
        data, self.held = bytes(self.held[:size]), self.held[size:]
        if self.is_closing:
            self.held = NOTHING
            return 0
        self._parse(data)
        if self.held:
            self._turns.add(self._parse_held, is_urgent=self._in_head)
        elif not (self.is_closing or self.flow.read_paused):
            self._raw.resume_reading()
        return len(data)

    @property
    def _parsed_bytes(self) -> int:
        return FIRST_BYTES if self._in_head else PARSED_BYTES

    def _parse(self, data: bytes) -> None:
        self._has_begun = False
        super().data_received(data)
        if self.is_closing:
            return
        if not self._has_begun:
            # Else the data may end another message, so parsed headers are counted.
            self._overhead += len(data)
            if self._overhead > self._allowed:
                self._error = self._too_large()
                self._refuse(self._error)
                return
        if self._in_head and self._timer is None and not self._is_answering:
            self._expect_head()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun, self._in_message = True, True
        self._header_count = self._overhead = 0
        self._allowed = self._config.max_header_bytes

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_count += 1
        if self._header_count > MAX_HEADERS:
            self._stop(ApiError(
                431, f"headers: found more than {MAX_HEADERS}; send fewer",
                code="headers_too_large",
            ))  # fmt: skip
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_timer()
        self._connections.idle.pop(self, None)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(ApiError(
                400, f"pipelining: found more than {MAX_PIPELINED} requests before an "
                "answer; wait for answers",
            ))  # fmt: skip
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        # An answer before the end of the message ends the connection, and says so.
        self._keeps_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._allowed += FRAMING_PER_BYTE * len(body)
        self._overhead -= len(body)
        cycle = self.cycle
        if len(cycle.body) + len(body) < BODY_BYTES and not cycle.response_complete:
            cycle.body += body
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message, self._in_head = False, True
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._unanswered:
            self._unanswered.popleft()
        super().on_response_complete()
        if not (self.is_closing or self._is_answering):
            self._connections.idle[self] = None

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._cancel_send_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        if self._error is None:
            text = "request: found none of HTTP/1.1"
            self._error = ApiError(400, text, code="invalid_http")
        self._refuse(self._error)

    def _count(self, size: int) -> None:
        if self._has_begun:
            self._overhead += size
            if self._overhead > self._allowed:
                self._stop(self._too_large())

    def _too_large(self) -> ApiError:
        limit = self._config.max_header_bytes
        text = f"headers: found more than {limit} bytes, accepts {limit} (--max-header)"
        return ApiError(431, text, code="headers_too_large")

    def _stop(self, error: ApiError) -> None:
        """End the parser from one of its callbacks."""
        self._error = error
        raise _Stopped

    def _refuse(self, error: ApiError, *, drains: bool = True) -> None:
        """Answer what is no complete request, and close."""
        if self._is_answering:
            if self.cycle.response_started or self.pipeline:
                self._abort()  # this answer would be read as part of another one
                return
            self._disconnect()
        elif self.headers is not None:
            self.headers.clear()
        body = encode(error.openai())
        headers = {
            **error.headers,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._raw.write("\r\n".join([*lines, "", ""]).encode() + body)
        self._in_message = drains
        self.close()

    def _expect_head(self) -> None:
        self._cancel_timer()
        seconds = self._config.receive_seconds
        self._timer = self.loop.call_later(seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        self._turns.add(self._end_late)

    def _end_late(self) -> int:
        if self.is_closing or not self._in_head or self._is_answering:
            return 0  # its end has arrived meanwhile
        if not self._in_message:
            self.close()
            return 0
        seconds = self._config.receive_seconds
        text = f"headers: found no end within {seconds:g} s (--receive-seconds)"
        self._refuse(ApiError(408, text, code="request_timeout"))
        return 0

    @property
    def is_closing(self) -> bool:
        """Whether no further request is read."""
        return self._is_draining or self._raw.is_closing()

    def close(self) -> None:
        """Close once what was written has been sent.

        A client that is still sending could not read the answer if its data were
        refused, so some of them are read first.
        """
        if self.is_closing:
            return
        self._connections.idle.pop(self, None)
        self._cancel_timer()
        seconds = self._config.send_seconds
        if self._in_message and self._raw.can_write_eof():
            self._is_draining, self._overhead = True, 0
            self.parser = None  # type: ignore[assignment]  # it has a part of a header
            self._raw.write_eof()
            self._connections.drain(self)
            if self._error is None:
                self._raw.resume_reading()
            else:  # the rest is no request, and may have no end
                self._raw.pause_reading()
            seconds = min(seconds, DRAIN_SECONDS)
        else:
            self._raw.close()
        self._timer = self.loop.call_later(seconds, self._raw.abort)

    def _watch_reader(self) -> None:
        self._cancel_send_timer()
        size = self._raw.get_write_buffer_size()
        seconds = self._config.send_seconds
        self._send_timer = self.loop.call_later(seconds, self._check_reader, size)

    def _check_reader(self, before: int) -> None:
        taken = before - self._raw.get_write_buffer_size()
        if taken >= BYTES_PER_SECOND * self._config.send_seconds:
            self._watch_reader()
            return
        log.warning(
            "a client took %d bytes of its answer in %g s and was disconnected "
            "(--send-seconds)", taken, self._config.send_seconds,
        )  # fmt: skip
        self._drop_unsent()
        self._abort()

    def _drop_unsent(self) -> None:
        """Let the system forget what it has not sent when the connection is closed.

        Else it would offer megabytes for minutes to a client that does not read.
        """
        found = self._raw.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # a transport without a socket
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def _ignore() -> None:
    """Take the place of what refers to a connection."""


class _Stopped(Exception):
    """Ends the parser; the connection has the error."""


class _Transport:
    """A transport that is closed by its connection, to which it has no reference."""

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._raw = transport
        self.pause_reading = transport.pause_reading
        self._resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info
        self._connection = weakref.ref(connection)

    def write(self, data: bytes) -> None:
        """Write data; drop them once the connection has ended, where uvloop raises."""
        if not self._raw.is_closing():
            self._raw.write(data)

    def resume_reading(self) -> None:
        connection = self._connection()
        if connection is not None and not connection.held:
            self._resume_reading()

    def close(self) -> None:
        if (connection := self._connection()) is not None:
            connection.close()

    def is_closing(self) -> bool:
        connection = self._connection()
        return connection is None or connection.is_closing
