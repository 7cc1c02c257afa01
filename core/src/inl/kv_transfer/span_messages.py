"""Messages with contents of a sequence, as both sides of a link read and write them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from inl.errors import ProtocolError
from inl.kv_transfer.link import Kind, Message
from inl.kv_transfer.spans import TokenSpan, tokens_digest


def span_fields(ticket: str, span: TokenSpan, tokens: Sequence[int]) -> dict[str, Any]:
    """Return what a message says of contents. tokens: of the sequence, from the first.

    The receiver compares their digest with its own: a connection without a fault may
    carry contents of other tokens.
    """
    return {
        "ticket": ticket, "group": span.group, "start": span.start,
        "block_size": span.block_size, "tokens": tokens_digest(tokens, span.stop),
    }  # fmt: skip


def received_span(message: Message) -> TokenSpan:
    """Return the contents of a message; raises :class:`~inl.errors.ProtocolError`."""
    fields = message.fields
    if message.kind is Kind.SPAN:
        with suppress(KeyError, TypeError, ValueError):
            return TokenSpan(
                int(fields["group"]), int(fields["start"]), int(fields["block_size"]),
                message.parts,
            )  # fmt: skip
    raise ProtocolError(f"ticket: found {message.kind.name} with {fields!r:.100}")
