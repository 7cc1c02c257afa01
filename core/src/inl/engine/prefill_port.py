"""Computes prompts for other engines, and pushes their blocks as they are complete."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.bounded_json import MAX_BYTES as MAX_ASK
from inl.engine.link_port import LinkPort
from inl.errors import PluginError, ProtocolError, RequestError
from inl.kv_transfer.link import Kind, Link, Message
from inl.kv_transfer.span_messages import span_fields
from inl.kv_transfer.transport import offered
from inl.spec.cache_layout import SLOT_GROUP
from inl.spec.message import MAX_TRANSFER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inl.engine.block_access import BlockAccess
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.request_handle import RequestHandle
    from inl.kv_transfer.spans import TokenSpan
    from inl.kv_transfer.transport import Room, Rooms
    from inl.spec.cache_layout import Parts

    Send = Callable[[dict[str, Any], Parts], None]

MAX_SECONDS = 600.0
"""Longest time of a ticket."""
POLL_SECONDS = 0.01
SPANS, MOST_SPANS, SPAN_BYTES = 4, 64, 256 << 20
"""Spans of 16 blocks that are read at a time, between two steps, and are in memory
while the decoding engine has no room: so many bytes, but not less or more spans."""


class PrefillPort(LinkPort):
    """Listens for decoding engines; a connection is one ticket.

    identity: digest of what contents depend on. rooms: of a plugin's
    transport. ``counts``: tickets that were "done",
    "refused" or "failed"; "blocks" that were sent. Raises
    :class:`~inl.errors.DeviceError` for an address that cannot be used.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        blocks: BlockAccess,
        identity: str,
        address: str,
        secret: bytes | None,
        *,
        rooms: Rooms | None = None,
    ) -> None:
        self._rooms = rooms
        self._engine, self._blocks, self._identity = engine, blocks, identity
        layout = engine.runner.cache_layout
        assert layout is not None, "the engine copies blocks"
        most = max((each.block_bytes for each in layout.groups), default=1)
        spans = max(SPAN_BYTES // (MAX_TRANSFER * most), SPANS)
        self._spans = min(spans, MOST_SPANS)
        super().__init__(address, secret, "EngineConfig.kv_peer")

    def _serve_link(self, link: Link) -> None:
        message = link.receive(MAX_ASK)
        if message.kind is not Kind.ASK:
            raise ProtocolError(f"ticket: found {message.kind.name}, accepts ASK")
        with nullcontext() if self._rooms is None else self._rooms.room() as room:
            self._serve_ask(link, message, room)

    def _serve_ask(self, link: Link, message: Message, room: Room | None) -> None:
        try:
            ask = _Ask(message.fields)
            offer = offered(message.fields, None if room is None else room.name)
            handle = self._start(ask)
        except (RequestError, PluginError) as error:
            self._count("refused")
            link.send(Kind.REFUSED, {"reason": str(error)})
            return
        link.extend(time.monotonic() + ask.seconds)
        send: Send = partial(link.send, Kind.SPAN)
        if room is not None and offer is not None:
            send = partial(room.send, link, offer)
        try:
            self._push(link, ask, handle, send)
        finally:
            self._engine.cancel(handle)

    def _start(self, ask: _Ask) -> RequestHandle:
        """Begin to compute a prompt; raises :class:`~inl.errors.RequestError`."""
        if ask.identity != self._identity:
            raise RequestError(
                "another model, dtype or setting that changes keys and values"
            )
        use = self._engine.use_adapter(ask.adapter)
        digest = "" if use is None else use.source.digest
        if digest != ask.adapter_digest:
            raise RequestError(f"the adapter {ask.adapter!r} is another one here")
        captures = self._blocks.carries_state
        # The decoding engine computes the last token, after the state of all before.
        prompt = ask.prompt[:-1] if captures else ask.prompt
        return self._engine.start(
            prompt, listener=None, adapter_use=use, max_tokens=1, temperature=0,
            top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
            cache_salt=ask.salt, key=ask.key, deadline=time.time() + ask.seconds,
            captures=captures,
        )  # fmt: skip

    def _push(self, link: Link, ask: _Ask, handle: RequestHandle, send: Send) -> None:
        """Send blocks while the prompt is computed, in the order of positions."""
        sent = [0] * self._engine.runner.limits.groups
        while True:
            is_last = handle.completed
            while spans := self._read(handle, sent, is_last=is_last):
                for span in spans:
                    fields = span_fields(ask.ticket, span, ask.prompt)
                    send(fields, span.parts)
                    self._count("blocks", span.blocks)
                    if span.group != SLOT_GROUP:
                        sent[span.group] = span.stop // span.block_size
            if is_last:
                if handle.error is not None:
                    raise RequestError(f"the prompt has failed: {handle.error}")
                link.send(Kind.DONE, {"ticket": ask.ticket})
                self._count("done")
                return
            if self._closed or link.is_closed(POLL_SECONDS):
                raise ConnectionResetError("the decoding engine has closed")

    def _read(
        self, handle: RequestHandle, sent: Sequence[int], *, is_last: bool
    ) -> Sequence[TokenSpan]:
        """Return the next contents to send. sent: blocks of each group so far."""
        request = handle.request
        if not request.captures:
            return self._blocks.read(request, sent, self._spans)
        if not is_last:
            return ()
        captured, request.captured = request.captured, ()
        return captured


class _Ask:
    """A ticket and its prompt; raises :class:`~inl.errors.RequestError`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        try:
            self.ticket, self.identity = str(fields["ticket"]), fields["identity"]
            self.seconds = min(float(fields["seconds"]), MAX_SECONDS)
            if not self.seconds > 0:  # or not a number
                raise ValueError(f"seconds {self.seconds:g}")
            self.prompt = [int(token) for token in fields["prompt"]]
            adapter = fields["adapter"]
            self.adapter = None if adapter is None else str(adapter)
            self.adapter_digest = str(fields["adapter_digest"])
            self.salt, self.key = str(fields["salt"]), str(fields["key"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"ticket: found a field that is not valid: {error}"
            ) from None
