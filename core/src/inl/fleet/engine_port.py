"""The port of an engine without HTTP, for front-ends of other processes and hosts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from inl.errors import DeviceError
from inl.fleet.block_feed import BlockFeed
from inl.fleet.moving import EngineMoving
from inl.fleet.proofs import (
    is_equal,
    new_hello,
    proof,
    usable_secret,
    version_problem,
)
from inl.serve.frontends.engine_end import EngineEnd
from inl.serve.frontends.link import Link
from inl.serve.frontends.messages import (
    Drain,
    Follow,
    Hello,
    Knock,
    Message,
    ModelSettings,
    Ping,
    Pong,
    Prefixes,
    Refused,
    Replica,
)
from inl.serve.frontends.transcripts import Transcripts
from inl.workers.encryption import Certificate, new_certificate
from inl.workers.settings import INSECURE, is_encrypted, parse_address, show_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from inl.engine.inference_engine import InferenceEngine
    from inl.serve.server import Server

log = logging.getLogger("inl.serve")

KNOCK_SECONDS = 5.0
"""Time for a connection to prove itself."""

KNOCK_BYTES = 256
"""Size of a message before that."""

MAX_KNOCKS = 64
"""Connections that have proved nothing; one more is closed."""

EXPORT_SECONDS = 2.0
"""Time of an engine that ends to let others take what it has not finished."""

POLL_SECONDS = 0.05

STALL_SECONDS = 30.0
"""Time without a step after which an engine with open requests has a problem."""

TLS_RECORD = b"\x16"
"""First byte of a handshake of TLS."""

OPTIONS = (
    "kv_dtype", "quantize", "use_kv_cache", "velocity", "invariant", "sampling",
)  # fmt: skip
"""Settings of an engine that change tokens, beside its model and its dtype."""


def identity_of(engine: InferenceEngine) -> dict[str, str]:
    """Return what decides which tokens follow a prompt, by name."""
    values = {name: str(getattr(engine.config, name)) for name in OPTIONS}
    for name in engine.adapters:
        use = engine.use_adapter(name)
        assert use is not None, "a name has an adapter"
        values[f"adapter {name}"] = use.source.digest
    return {
        "model": engine.core.config.model_digest,
        "dtype": engine.dtype,
        "context": str(engine.context),
        "sampling defaults": str(sorted(engine.sampling_defaults.items())),
        **values,
    }


class EnginePort:
    """Answers front-ends that connect over TCP. Used by the event loop only.

    server: has one model, which is loaded. listening: a socket to use in place of
    one at ``address``. secret: that front-ends must know.
    """

    def __init__(
        self,
        server: Server,
        address: str,
        secret: bytes | None,
        listening: socket.socket | None = None,
    ) -> None:
        self._server = server
        host, port = parse_address(address, "--listen")
        self._secret = usable_secret(secret, host)
        self._moving = EngineMoving(host, self._secret)
        self._certificate: Certificate | None = None
        if is_encrypted(host):
            self._certificate = new_certificate()
        if listening is None:
            try:
                listening = socket.create_server(
                    (host, port),
                    family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                )
            except OSError as error:
                raise DeviceError(
                    f"--listen {address}: {error.strerror}; accepted: an address of "
                    "this host with a free port, 0 for any"
                ) from error
        listening.setblocking(False)
        self._listening = listening
        self.address = show_address(host, listening.getsockname()[1])
        self.name = secrets.token_hex(4)
        self._transcripts = Transcripts()
        self.feed: BlockFeed | None = None
        """Of the engine, while it serves."""
        self._links: set[_FrontEndLink] = set()
        self._knocks = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._is_stopping = False

    async def serve(self, started: Callable[[], None]) -> None:
        """Serve until :meth:`stop`, then finish the open requests."""
        engine, events = self._server.models.default.engine, self._server.kv_events
        assert engine is not None, "loaded before it listens"
        self.feed = BlockFeed(engine, None if events is None else events.put)
        accepting = asyncio.create_task(self._accept())
        started()
        try:
            await self._stopped.wait()
        finally:
            accepting.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(accepting, *self._tasks, return_exceptions=True)
            self._listening.close()
            self._moving.close()
            for link in list(self._links):
                await link.close()

    def stop(self) -> None:
        """Accept no more requests, and end once the open ones have finished.

        A second call ends them.
        """
        if self._is_stopping:
            self._stopped.set()
            return
        self._is_stopping = True
        for link in self._links:
            link.send(Drain(force=False))
        task = asyncio.create_task(self._drain())
        self._tasks.add(task)

    async def _drain(self) -> None:
        """End once no request is open, or the time for it is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._server.config.drain_seconds):
                await self._until_idle()
        with suppress(TimeoutError):
            async with asyncio.timeout(EXPORT_SECONDS):
                await asyncio.gather(*(link.export() for link in self._links))
                # Front-ends leave what goes on elsewhere, which takes its contents.
                await self._until_idle()
                while self._moving.is_awaited:
                    await asyncio.sleep(POLL_SECONDS)
        self._tasks.clear()  # not cancelled by the end that it begins
        self._stopped.set()

    async def _until_idle(self) -> None:
        while any(slot.admission.open for slot in self._server.models):
            await asyncio.sleep(POLL_SECONDS)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listening)
            except OSError:  # such as a limit of open files
                await asyncio.sleep(0.25)
                continue
            if self._knocks >= MAX_KNOCKS:
                sock.close()
                await asyncio.sleep(0)  # accepting does not wait while others connect
                continue
            task = asyncio.create_task(self._admit(sock, str(address[0])))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _admit(self, sock: socket.socket, host: str) -> None:
        """Wait until a front-end has proved itself, for a bounded time."""
        self._knocks += 1
        link = _FrontEndLink(self, host)
        try:
            async with asyncio.timeout(KNOCK_SECONDS):
                await link.open(sock, self._certificate)
                await link.proved.wait()
        except (OSError, TimeoutError, DeviceError) as error:
            reason = str(error) or f"proved nothing within {KNOCK_SECONDS:g} s"
            log.warning("front-end %s: %s", host, reason)
            await link.close()
            sock.close()
        finally:
            self._knocks -= 1

    def check(self, theirs: bytes, frontend: Hello, ours: Hello, binding: bytes) -> str:
        """Return why a proof is not accepted; empty if it is."""
        wanted = proof(self._secret, b"frontend", frontend, ours, binding)
        return "" if is_equal(theirs, wanted) else "wrong secret"

    def describe(self, frontend: Hello, ours: Hello, binding: bytes) -> Replica:
        """Return what a front-end needs to know."""
        slot = self._server.models.default
        engine = slot.engine
        assert engine is not None, "loaded before it listens"
        limits, caches = engine.runner.limits, engine.config.prefix_cache
        return Replica(
            proof(self._secret, b"engine", frontend, ours, binding),
            [ModelSettings(slot.name, slot.adapters, slot.place, engine.context)],
            identity_of(engine),
            str(engine.device),
            self._server.max_batch,
            limits.block_size * min(limits.blocks) if caches else 0,
            engine.context,
            dict(engine.sampling_defaults),
            sorted(engine.core.config.eos_ids),
            self.name,
            time.time(),
            exports=True,
        )

    def problem(self) -> str | None:
        """Return why the engine answers no request now."""
        engine = self._server.models.default.engine
        if engine is not None and (seconds := engine.stalled_seconds) > STALL_SECONDS:
            return f"no step has ended for {seconds:.0f} s"
        return None

    def joined(self, link: _FrontEndLink) -> EngineEnd:
        """Answer the calls of a front-end that has proved itself."""
        self._links.add(link)
        server = self._server
        assert link.link is not None, "open"
        end = EngineEnd(
            server.endpoints, server.models, server.responses, link.link,
            self._transcripts, self._moving,
        )  # fmt: skip
        if self._is_stopping:
            link.send(Drain(force=False))
        return end

    def left(self, link: _FrontEndLink) -> None:
        """Forget a front-end."""
        self._links.discard(link)
        if self.feed is not None:
            self.feed.leave(link)


class _FrontEndLink:
    """The link to one front-end, from its first byte on."""

    def __init__(self, port: EnginePort, host: str) -> None:
        self.proved = asyncio.Event()
        """Set once it has proved itself, or is closed."""
        self.link: Link | None = None
        self._port, self._host = port, host
        self._binding = b""
        self._hello: Hello | None = None
        self._ours = new_hello()
        self._end: EngineEnd | None = None
        self._ending: asyncio.Task[None] | None = None

    async def open(self, sock: socket.socket, certificate: Certificate | None) -> None:
        """Begin, with TLS if the other side begins so."""
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = None
        if certificate is not None:
            first = await _first_byte(sock)
            if first == TLS_RECORD:
                context, self._binding = certificate.context, certificate.digest
            elif is_encrypted(self._host):
                raise DeviceError(
                    f"front-ends of other hosts encrypt; unset {INSECURE} there, or "
                    "set it in both, in a network of trusted hosts only"
                )

        def make() -> Link:
            self.link = Link(self._receive, self._lost, self._resumed)
            self.link.max_bytes = KNOCK_BYTES
            return self.link

        await loop.connect_accepted_socket(make, sock, ssl=context)

    def send(self, message: Message) -> None:
        """Send a message."""
        if self.link is not None:
            self.link.send(message)

    def _send_prefixes(self, message: Prefixes) -> None:
        """Send a message, unless it would wait for others: the next one shows the gap.

        All blocks are sent in any case.
        """
        if self.link is not None and (message.is_whole or not self.link.is_behind):
            self.link.send(message)

    async def export(self) -> None:
        """End all completions for other engines.

        Front-ends of version 1 continue them once the link has ended.
        """
        hello, end = self._hello, self._end
        if end is not None and hello is not None and hello.version > 1:
            await end.calls.export_all()

    async def close(self) -> None:
        """End all calls, and the link."""
        if self.link is not None:
            self.link.close()
        if self._ending is not None:
            await asyncio.wait([self._ending])

    def _receive(self, message: Message) -> None:
        if self._end is not None:
            if isinstance(message, Ping):
                self.send(Pong(self._port.problem()))
            elif isinstance(message, Follow):
                assert self._port.feed is not None, "it serves"
                self._port.feed.follow(self, self._send_prefixes)
            else:
                self._end.receive(message)
        elif isinstance(message, Hello) and self._hello is None:
            if (reason := version_problem(message)) is not None:
                self._refuse(reason)
                return
            self._hello = message
            self.send(self._ours)
        elif isinstance(message, Knock) and self._hello is not None:
            self._knock(message, self._hello)
        else:
            self._refuse(f"found {type(message).__name__.lower()} before its proof")

    def _knock(self, message: Knock, hello: Hello) -> None:
        port = self._port
        if reason := port.check(message.proof, hello, self._ours, self._binding):
            self._refuse(reason)
            return
        assert self.link is not None, "it has received"
        self.link.max_bytes = 1 << 30
        self.send(port.describe(hello, self._ours, self._binding))
        self._end = port.joined(self)
        self.proved.set()
        log.info("front-end %s: connected", self._host)

    def _refuse(self, reason: str) -> None:
        log.warning("front-end %s: refused: %s", self._host, reason)
        self.send(Refused(reason))
        if self.link is not None:
            self.link.close()

    def _resumed(self) -> None:
        if self._end is not None:
            self._end.calls.flush()
            if self._port.feed is not None:
                self._port.feed.resume(self)

    def _lost(self) -> None:
        self.proved.set()
        self.link = None
        if self._end is not None:
            log.info("front-end %s: disconnected", self._host)
            self._port.left(self)
            self._ending = asyncio.create_task(self._end.abort())


async def _first_byte(sock: socket.socket) -> bytes:
    """Return the first byte that arrives, which stays to be read."""
    loop: Any = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock.fileno())
    return sock.recv(1, socket.MSG_PEEK)
