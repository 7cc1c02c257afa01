"""Contents of requests that have left an engine, for the one that goes on with them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from inl.bounded_json import MAX_BYTES as MAX_ASK
from inl.engine.link_port import LinkPort
from inl.errors import ProtocolError
from inl.kv_transfer.link import Kind, Link, connect
from inl.kv_transfer.span_messages import received_span, span_fields
from inl.kv_transfer.spans import SequenceContents, TokenSpan, tokens_digest

if TYPE_CHECKING:
    from inl.engine.moved_request import MovedRequest

SECONDS = 30.0
"""Time for which contents are held, and of a connection that takes them."""
MAX_BYTES = 1 << 30
"""Contents that are held; those of further requests are computed again."""


class _Held(NamedTuple):
    moved: MovedRequest
    nbytes: int
    until: float


class StatePort(LinkPort):
    """Gives the contents of requests to those who know their ticket, once.

    ``counts``: tickets that were "done", "refused" or "failed". Raises as
    :class:`LinkPort`.
    """

    def __init__(self, address: str, secret: bytes | None) -> None:
        self._held: dict[str, _Held] = {}
        self._serving = 0
        """Tickets whose contents are being sent."""
        super().__init__(address, secret, "address of moved requests")

    def hold(self, moved: MovedRequest) -> str:
        """Hold contents of a request; returns their ticket, or "" without room."""
        nbytes = sum(part.data.nbytes for x in moved.spans for part in x.parts.values())
        now = time.monotonic()
        with self._lock:
            for ticket, held in list(self._held.items()):
                if held.until <= now:
                    del self._held[ticket]
            total = nbytes + sum(held.nbytes for held in self._held.values())
            if not moved.spans or total > MAX_BYTES:
                return ""
            ticket = secrets.token_hex(16)
            self._held[ticket] = _Held(moved, nbytes, now + SECONDS)
        return ticket

    @property
    def is_awaited(self) -> bool:
        """Whether contents wait for the one who knows their ticket, or go there."""
        now = time.monotonic()
        with self._lock:
            return self._serving > 0 or any(x.until > now for x in self._held.values())

    def _serve_link(self, link: Link) -> None:
        message = link.receive(MAX_ASK)
        if message.kind is not Kind.TAKE:
            raise ProtocolError(f"ticket: found {message.kind.name}, accepts TAKE")
        ticket = str(message.fields.get("ticket"))
        with self._lock:
            held = self._held.pop(ticket, None)
            self._serving += held is not None
        if held is None:
            self._count("refused")
            link.send(Kind.REFUSED, {"reason": "the ticket is unknown or has expired"})
            return
        try:
            self._send(link, ticket, held.moved)
        finally:
            with self._lock:
                self._serving -= 1

    def _send(self, link: Link, ticket: str, moved: MovedRequest) -> None:
        link.extend(time.monotonic() + SECONDS)
        tokens = [*moved.prompt_ids, *moved.output_ids]
        for span in moved.spans:
            fields = span_fields(ticket, span, tokens)
            link.send(Kind.SPAN, fields, span.parts)
        link.send(Kind.DONE, {"ticket": ticket, "identity": moved.identity})
        self._count("done")


def take_contents(
    address: str, secret: bytes | None, ticket: str, tokens: Sequence[int]
) -> SequenceContents:
    """Take the contents that another engine holds of a request with these tokens.

    Waits :data:`SECONDS` at most. Raises OSError, and
    :class:`~inl.errors.ProtocolError` and :class:`~inl.errors.DeviceError` for what
    cannot be used.
    """
    link = connect(address, secret, time.monotonic() + SECONDS)
    spans: list[TokenSpan] = []
    try:
        link.send(Kind.TAKE, {"ticket": ticket})
        while True:
            message = link.receive()
            if message.kind is Kind.REFUSED:
                reason = str(message.fields.get("reason"))
                raise ProtocolError(f"{address}: {reason:.200}")
            if message.fields.get("ticket") != ticket:
                raise ProtocolError(f"{address}: found contents of another ticket")
            if message.kind is Kind.DONE:
                identity = str(message.fields.get("identity"))
                return SequenceContents(identity, spans)
            span = received_span(message)
            digest = tokens_digest(tokens, span.stop)
            if not digest or message.fields.get("tokens") != digest:
                raise ProtocolError(f"{address}: found contents of other tokens")
            spans.append(span)
    finally:
        link.close()
