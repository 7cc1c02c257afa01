"""Computes prompts for other engines, and pushes their blocks as they are complete."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from inl.bounded_json import MAX_BYTES as MAX_ASK
from inl.errors import DeviceError, InlError, ProtocolError, RequestError
from inl.kv_transfer.link import HELLO_SECONDS, Kind, Link, accept, link_secret
from inl.kv_transfer.spans import tokens_digest
from inl.workers.encryption import Certificate, new_certificate, shake_hands
from inl.workers.listener import TLS_RECORD
from inl.workers.settings import INSECURE, is_encrypted, parse_address, show_address

if TYPE_CHECKING:
    from inl.engine.block_access import BlockAccess
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.request_handle import RequestHandle

log = logging.getLogger("inl")

MAX_LINKS = 256
"""Open connections; one more is closed."""
MAX_SECONDS = 600.0
"""Longest time of a ticket."""
POLL_SECONDS = 0.01
SPANS = 4
"""Spans of 16 blocks that are in memory while the decoding engine has no room."""


class PrefillPort:
    """Listens for decoding engines; a connection is one ticket.

    identity: digest of what contents depend on. Raises
    :class:`~inl.errors.DeviceError` for an address that cannot be used.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        blocks: BlockAccess,
        identity: str,
        address: str,
        secret: bytes | None,
    ) -> None:
        self._engine, self._blocks, self._identity = engine, blocks, identity
        host, port = parse_address(address, "EngineConfig.kv_peer")
        self._secret = link_secret(secret, host)
        self._certificate: Certificate | None = None
        if is_encrypted(host):
            self._certificate = new_certificate()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise DeviceError(
                f"EngineConfig.kv_peer {address}: {error.strerror}; accepted: an "
                "address of this host with a free port, 0 for any"
            ) from error
        self.address = show_address(host, self._listening.getsockname()[1])
        self.counts: Counter[str] = Counter()
        """Tickets that were "done", "refused" or "failed"; "blocks" that were sent."""
        self._links = 0
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="inl-prefill", daemon=True).start()

    def close(self) -> None:
        """Stop listening; open tickets end. Closing twice is allowed."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                if not self._closed:
                    time.sleep(POLL_SECONDS)  # too many open files
                continue
            with self._lock:
                is_full = self._links >= MAX_LINKS
                self._links += not is_full
            if is_full:
                sock.close()
                continue
            serve = partial(self._serve, sock)
            threading.Thread(target=serve, name="inl-prefill-link", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock, binding = self._encrypted(sock)
            self._serve_ticket(sock, binding)
        except (OSError, InlError) as error:
            self._count("failed")
            log.info("prefill: a ticket has ended: %s", error)
        finally:
            sock.close()
            with self._lock:
                self._links -= 1

    def _encrypted(self, sock: socket.socket) -> tuple[socket.socket, bytes]:
        """Begin TLS with an engine of another host; returns the certificate's digest.

        One of this host sends plain bytes, whatever address the port listens at.
        """
        sock.settimeout(HELLO_SECONDS)
        first = sock.recv(1, socket.MSG_PEEK)
        if self._certificate is not None and first == TLS_RECORD:
            encrypted = self._certificate.context.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
            try:
                shake_hands(encrypted, time.monotonic() + HELLO_SECONDS)
            except BaseException:
                encrypted.close()
                raise
            return encrypted, self._certificate.digest
        if is_encrypted(sock.getpeername()[0]):
            raise ProtocolError(
                f"ticket: found no TLS, accepts engines of other hosts with it; unset "
                f"{INSECURE} there, or set it in both, in a network of trusted hosts "
                "only"
            )
        return sock, b""

    def _count(self, name: str, value: int = 1) -> None:
        with self._lock:
            self.counts[name] += value

    def _serve_ticket(self, sock: socket.socket, binding: bytes) -> None:
        link = accept(sock, self._secret, binding, time.monotonic() + HELLO_SECONDS)
        message = link.receive(MAX_ASK)
        if message.kind is not Kind.ASK:
            raise ProtocolError(f"ticket: found {message.kind.name}, accepts ASK")
        try:
            ask = _Ask(message.fields)
            handle = self._start(ask)
        except RequestError as error:
            self._count("refused")
            link.send(Kind.REFUSED, {"reason": str(error)})
            return
        link.extend(time.monotonic() + ask.seconds)
        try:
            self._push(link, ask, handle)
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
        return self._engine.start(
            ask.prompt, listener=None, adapter_use=use, max_tokens=1, temperature=0,
            top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
            cache_salt=ask.salt, key=ask.key, deadline=time.time() + ask.seconds,
        )  # fmt: skip

    def _push(self, link: Link, ask: _Ask, handle: RequestHandle) -> None:
        """Send blocks while the prompt is computed, in the order of positions."""
        sent = [0] * self._engine.runner.limits.groups
        while True:
            is_last = handle.completed
            while spans := self._blocks.read(handle.request, sent, SPANS):
                for span in spans:
                    fields = {
                        "ticket": ask.ticket, "group": span.group,
                        "start": span.start, "block_size": span.block_size,
                        "tokens": tokens_digest(ask.prompt, span.stop),
                    }  # fmt: skip
                    link.send(Kind.SPAN, fields, span.parts)
                    sent[span.group] = span.stop // span.block_size
                    self._count("blocks", span.blocks)
            if is_last:
                if handle.error is not None:
                    raise RequestError(f"the prompt has failed: {handle.error}")
                link.send(Kind.DONE, {"ticket": ask.ticket})
                self._count("done")
                return
            if self._closed or link.is_closed(POLL_SECONDS):
                raise ConnectionResetError("the decoding engine has closed")


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
