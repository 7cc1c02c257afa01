"""Lets another engine compute prompts; whatever does not arrive is computed here."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import count
from typing import TYPE_CHECKING

from inl.errors import DeviceError, InlError, ProtocolError
from inl.kv_transfer.carried import MAX_BYTES
from inl.kv_transfer.link import Kind, Link, connect
from inl.kv_transfer.read_ahead import ReadAhead
from inl.kv_transfer.span_messages import received_span
from inl.kv_transfer.spans import (
    Recut,
    checked_index,
    tokens_digest,
    transfer_identity,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inl.engine.block_access import BlockAccess
    from inl.engine.request_handle import RequestHandle
    from inl.kv_tiers.record import Identity
    from inl.kv_transfer.carried import CarriedSpans
    from inl.kv_transfer.transport import Room, Rooms

log = logging.getLogger("inl")

SECONDS = 60.0
"""Time of a ticket."""
LEAST_TOKENS = 64
"""Tokens that are lacking from which on another engine is asked."""
AWAY_SECONDS = 5.0
"""Time for which an engine that did not answer is not asked."""
THREADS = 64
"""Tickets that are open at a time; further requests wait for one."""


class Refused(Exception):
    """A ticket that ends early; ``kind`` is what it is counted as."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class RemotePrefill:
    """Asks prefilling engines at ``addresses`` in turn, before requests are queued.

    Thread-safe. blocks: of an engine with tiers, whose memory receives contents.
    most_bytes: of state that waits for requests, of models that share no blocks. rooms:
    of a plugin's transport.
    """

    def __init__(
        self, blocks: BlockAccess, identity: Identity, addresses: Sequence[str],
        secret: bytes | None, *, seconds: float = SECONDS, most_bytes: int = MAX_BYTES,
        rooms: Rooms | None = None,
    ) -> None:  # fmt: skip
        self._most_bytes, self._rooms = most_bytes, rooms
        self._blocks, self._identity = blocks, identity
        self._addresses, self._secret, self._seconds = tuple(addresses), secret, seconds
        self._turn, self._away = count(), dict.fromkeys(self._addresses, 0.0)
        self.counts: Counter[str] = Counter()
        """Tickets that were "done", "refused", "expired", or "failed" as the connection
        did; those that ended by contents that were "stale", "foreign" or "damaged", or
        without room, "full"; and "blocks" that have arrived."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="inl-decode")
        self._closed = False

    def fetch_all(self, handles: Sequence[RequestHandle]) -> None:
        """Wait for the blocks of several prompts."""
        long = [each for each in handles if self._is_long(each)]
        with suppress(RuntimeError):  # the threads have ended: it was closed
            list(self._threads.map(self.fetch, long))

    def fetch_then(
        self, handles: Sequence[RequestHandle], then: Callable[[], None]
    ) -> None:
        """As :meth:`fetch_all`, without waiting; calls ``then`` on a thread.

        At once for short prompts, which would wait for threads of long ones.
        """
        long = [each for each in handles if self._is_long(each)]

        def run() -> None:
            try:
                for handle in long:
                    self.fetch(handle)
            finally:
                then()

        if not long:
            then()
            return
        try:
            self._threads.submit(run)
        except RuntimeError:  # the threads have ended: it was closed
            then()

    def close(self) -> None:
        """Ask no more; open tickets end. Closing twice is allowed."""
        self._closed = True
        self._threads.shutdown(wait=False)

    def fetch(self, handle: RequestHandle) -> None:
        """Wait for the blocks of a prompt, as many as arrive. Raises nothing."""
        try:
            if not self._is_wanted(handle):
                return
            address = self._address()
            if address is None:
                return
            kind, reason = self._outcome(handle, address)
        except Exception as error:
            log.exception("prefill: a prompt is computed here")
            kind, reason = "failed", str(error)
        self._count(kind)
        if kind != "done":
            log.info("prefill: the rest of a prompt is computed here: %s", reason)

    @staticmethod
    def _is_long(handle: RequestHandle) -> bool:
        """Whether a prompt may lack enough tokens, which only the engine can say."""
        return handle.request.prompt_tokens >= LEAST_TOKENS

    def _is_wanted(self, handle: RequestHandle) -> bool:
        request = handle.request
        scored = request.prompt_logprobs is not None
        if request.embeddings is not None or request.pooled or scored:
            return False
        if self._closed or handle.completed:
            return False
        return self._blocks.lacking_tokens(request) >= LEAST_TOKENS

    def _address(self) -> str | None:
        """Return the next engine that answers, as far as is known."""
        now = time.monotonic()
        for _ in self._addresses:
            address = self._addresses[next(self._turn) % len(self._addresses)]
            if self._away[address] <= now:
                return address
        return None

    def _outcome(self, handle: RequestHandle, address: str) -> tuple[str, str]:
        """Run a ticket; return what it is counted as, and why."""
        try:
            link = connect(address, self._secret, time.monotonic() + self._seconds)
        except (OSError, ProtocolError, DeviceError) as error:
            self._away[address] = time.monotonic() + AWAY_SECONDS
            return "failed", f"{address}: {error}"
        try:
            with nullcontext() if self._rooms is None else self._rooms.room() as room:
                self._receive(link, handle, room)
        except Refused as refused:
            return refused.kind, str(refused)
        except TimeoutError:
            return "expired", f"{address}: after {self._seconds:g} s"
        except ProtocolError as error:
            return "damaged", f"{address}: {error}"
        except (OSError, InlError) as error:
            return "failed", f"{address}: {error}"
        finally:
            link.close()
        return "done", ""

    def _receive(self, link: Link, handle: RequestHandle, room: Room | None) -> None:
        request, ticket = handle.request, secrets.token_hex(16)
        link.is_wanted = lambda: not (handle.completed or self._closed)
        generation = self._blocks.generation
        adapter = handle.options.get("adapter")
        link.send(Kind.ASK, {
            "ticket": ticket, "identity": transfer_identity(self._identity),
            "seconds": self._seconds, "prompt": request.tokens, "adapter": adapter,
            "adapter_digest": request.adapter_digest, "salt": request.cache_salt,
            "key": request.key, "transport": None if room is None else room.offer,
        })  # fmt: skip
        # Over a transport, each message is answered.
        with nullcontext(link) if room is not None else ReadAhead(link) as messages:
            self._store_all(messages, link, room, handle, ticket, generation)

    def _store_all(
        self, messages: Link | ReadAhead, link: Link, room: Room | None,
        handle: RequestHandle, ticket: str, generation: int,
    ) -> None:  # fmt: skip
        """Store the contents of a ticket until all have arrived."""
        request = handle.request
        empty = self._blocks.empty
        recuts = [Recut(layout, empty) for layout in self._identity.layouts]
        carried = self._blocks.joined_spans() if self._blocks.carries_state else None
        while True:
            message = messages.receive()
            if room is not None:
                message = room.receive(link, message)
            if handle.completed or self._closed:
                raise Refused("refused", "the request was cancelled")
            if message.kind is Kind.REFUSED:
                raise Refused("refused", str(message.fields.get("reason"))[:200])
            if message.fields.get("ticket") != ticket:
                raise Refused("stale", "contents of another ticket")
            if message.kind is Kind.DONE:
                if carried is not None:
                    self._carry(handle, carried)
                return
            span = received_span(message)
            if carried is None:
                blocks = list(checked_index(recuts, span.group).add(span))
            else:
                count = carried.add(span)
            digest = tokens_digest(request.tokens, span.stop)
            if not digest or message.fields.get("tokens") != digest:
                raise Refused("foreign", "contents of other tokens")
            if carried is not None:
                self._count("blocks", count)
                continue
            stored = self._blocks.store(request, span.group, blocks, generation)
            if stored is None:
                raise Refused("stale", "the prefix cache was reset")
            self._count("blocks", stored)

    def _carry(self, handle: RequestHandle, carried: CarriedSpans) -> None:
        """Let a prompt and its samples begin with the state that has arrived."""
        state = carried.state(handle.request.prompt_tokens - 1)
        if state is None:
            raise Refused("refused", "a part of the state has not arrived")
        requests = [each.request for each in handle.samples]
        if not self._blocks.carry(requests, state, self._most_bytes):
            raise Refused("full", "the memory for state of other engines is full")

    def _count(self, name: str, value: int = 1) -> None:
        with self._lock:
            self.counts[name] += value
