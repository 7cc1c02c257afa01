"""A front-end's link to one engine: connects, proves itself, and notices silence."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from inl.fleet.proofs import (
    TELLS_PREFIXES,
    binding_of,
    is_equal,
    new_hello,
    proof,
    usable_secret,
    version_problem,
)
from inl.serve.frontends.link import Link
from inl.serve.frontends.messages import (
    Drain,
    Follow,
    Hello,
    Knock,
    Leave,
    Message,
    Ping,
    Pong,
    Refused,
    Replica,
)
from inl.workers.settings import is_encrypted, parse_address

if TYPE_CHECKING:
    from inl.serve.frontends.messages import ToEngine

log = logging.getLogger("inl.serve")

BEAT_SECONDS = 0.1
"""Time between two messages to an engine that has nothing else to answer."""

SILENT_BEATS, MOST_SILENT_BEATS = 5, 8
"""Beats without a byte from an engine after which its requests go on elsewhere: of one
that answers at once, and of one whose host is so busy that answers come late.

They are counted, not timed: an engine is not to blame if this process was stopped."""

LATE_TIMES = 4
"""Times of the latest answer, of the last ones, that an engine has at least."""

LATE_DECAY = 0.99
"""Factor of that time with each beat, which halves it in 7 s."""

LOST_BEATS = 300
"""Beats without a byte after which its link is closed and opened again."""

CLOCK_SECONDS = 5.0
"""Difference of an engine's clock to this host's from which on the log names it."""

LEAVE_SECONDS = 0.01
"""Time that the end of an answered request waits for another message to go with."""

CONNECT_SECONDS = 5.0
FIRST_RETRY_SECONDS, MOST_RETRY_SECONDS = 0.1, 2.0
REFUSED_RETRY_SECONDS = 5.0
"""Times between two attempts to connect: to an engine that is not there, and to one
that cannot be used as it is now."""


class State(Enum):
    """What an engine can do now."""

    ABSENT = "absent"
    """It is not connected."""
    REFUSED = "refused"
    """It has refused this front-end, or has other weights or options."""
    WARMING = "warming"
    """It computes recent prompts before it gets requests."""
    READY = "ready"
    SILENT = "silent"
    """It answers nothing, but may again."""
    DRAINING = "draining"
    """It finishes its open requests and gets no other ones: it stops, or operators
    have said so."""


class Engines(Protocol):
    """Who uses the links."""

    def opened(self, engine: EngineLink, described: Replica) -> str:
        """Use an engine; returns why it cannot be used, or nothing."""

    def refused(self, engine: EngineLink) -> None:
        """Record that an engine is not used."""

    def changed(self, engine: EngineLink) -> None:
        """React to another state."""

    def lost(self, engine: EngineLink) -> None:
        """Leave an engine that was opened, whose link has ended."""

    def received(self, engine: EngineLink, message: Message) -> None:
        """Apply a message of a request."""


class EngineLink:
    """One engine by its address. Used by the event loop only."""

    def __init__(self, address: str, secret: bytes | None, engines: Engines) -> None:
        self.address = address
        self.state = State.ABSENT
        self.reason = "is not connected yet"
        """Why it cannot be used, for people."""
        self.device = self.name = ""
        self.places = 0
        """Requests that it computes at the same time."""
        self.clock_seconds = 0.0
        """Time of day there, less that of here."""
        self.number = -1
        """Of this connection, for the router; each has another one."""
        self._engines = engines
        host, _ = parse_address(address, "--replica")
        self._secret = usable_secret(secret, host)
        self._link: Link | None = None
        self._ours = new_hello()
        self._theirs: Hello | None = None
        self.is_draining = False
        """Whether it has said that it stops."""
        self.is_held = False
        """Whether operators let it get no requests."""
        self.is_warming = False
        """Whether it computes recent prompts and gets no requests yet."""
        self.exports = False
        """Whether its requests can go on elsewhere with what its cache holds."""
        self._is_open = False
        self.changed_at = time.monotonic()
        """When it has come to its state."""
        self._pinged_at = 0.0
        """When it was asked for the sign of life that it owes; 0 if it owes none."""
        self._late_seconds = 0.0
        """The longest time that it took to answer, of the last ones."""
        self._problem = ""
        """What the engine says is wrong with it."""
        self._ended = asyncio.Event()
        self._answered: list[Leave] = []
        """Ends of requests that were answered, to send with another message."""

    def send(self, message: ToEngine) -> None:
        """Send a message; nothing if it is not connected."""
        if self._link is not None:
            self._link.send(message)
            if self._answered:
                self._send_answered()

    def leave(self, message: Leave) -> None:
        """Send the end of an answered request, with another message or soon."""
        if not self._answered:
            loop = asyncio.get_running_loop()
            loop.call_later(LEAVE_SECONDS, self._send_answered)
        self._answered.append(message)

    def _send_answered(self) -> None:
        answered, self._answered = self._answered, []
        for each in answered:
            if self._link is not None:
                self._link.send(each)

    async def run(self) -> None:
        """Connect, and connect again, until it is cancelled."""
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._connect()
                await self._watch()
                pause = FIRST_RETRY_SECONDS
            except (OSError, TimeoutError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                self._fail(f"cannot be reached: {reason or 'no answer'}")
                pause = min(2 * pause, MOST_RETRY_SECONDS)
            finally:
                self._close()
            is_refused = self.state is State.REFUSED
            await asyncio.sleep(REFUSED_RETRY_SECONDS if is_refused else pause)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = parse_address(self.address)
        self._theirs, self._ours = None, new_hello()
        self._ended.clear()
        context = None
        if is_encrypted(host):
            # The proofs contain the certificate's digest, so nobody vouches for it.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        async with asyncio.timeout(CONNECT_SECONDS):
            _, link = await loop.create_connection(
                lambda: Link(self._receive, self._ended.set), host, port, ssl=context
            )
        self._link = link
        sock: socket.socket = link.transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.send(self._ours)

    async def _watch(self) -> None:
        """Ping the engine until its link ends."""
        link, silent, seen = self._link, 0, -1
        assert link is not None, "connected"
        while silent < LOST_BEATS:
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._ended.wait()
                if self.state is not State.REFUSED:
                    self._fail("has closed its connection")
                return
            except TimeoutError:
                silent = 0 if link.received_bytes != seen else silent + 1
                seen = link.received_bytes
            if self._is_open:
                self._judge("does not answer" if silent >= self._patience() else "")
                self._late_seconds *= LATE_DECAY
                self._pinged_at = self._pinged_at or time.monotonic()
                self.send(Ping())
            elif silent * BEAT_SECONDS > CONNECT_SECONDS:
                break  # such as a port whose process is stopped
        self._fail("does not answer")

    def _patience(self) -> int:
        """Return after how many beats without a byte it is silent."""
        beats = math.ceil(LATE_TIMES * self._late_seconds / BEAT_SECONDS)
        return min(max(beats, SILENT_BEATS), MOST_SILENT_BEATS)

    def _judge(self, problem: str) -> None:
        """Set the state of an engine that is connected."""
        if problem := problem or self._problem:
            self._set(State.SILENT, problem)
        elif self.is_draining:
            self._set(State.DRAINING, "is stopping")
        elif self.is_held:
            self._set(State.DRAINING, "is drained by an operator")
        elif self.is_warming:
            self._set(State.WARMING, "computes recent prompts first")
        else:
            self._set(State.READY, "")

    def _receive(self, message: Message) -> None:
        if self._is_open:
            self._receive_open(message)
        elif isinstance(message, Hello) and self._theirs is None:
            if (problem := version_problem(message)) is not None:
                self._refuse(problem)
                return
            self._theirs = message
            self.send(Knock(self._proof(b"frontend")))
        elif isinstance(message, Refused):
            self._refuse(f"refused this front-end: {message.reason:.200}")
        elif isinstance(message, Replica) and self._theirs is not None:
            if not is_equal(message.proof, self._proof(b"engine")):
                self._refuse("does not know the secret")
                return
            self._open(message)
        else:
            self._refuse(f"sent {type(message).__name__} before its proof")

    def _receive_open(self, message: Message) -> None:
        if isinstance(message, Pong):
            if self._pinged_at and self.state is not State.SILENT:
                seconds = time.monotonic() - self._pinged_at
                self._late_seconds = max(self._late_seconds, seconds)
            self._pinged_at = 0.0
            self._problem = message.problem or ""
            if self._problem:
                self._judge("")
        elif isinstance(message, Drain):
            self.is_draining = True
            self._judge("")
        else:
            self._engines.received(self, message)

    def _proof(self, side: bytes) -> bytes:
        assert self._theirs is not None, "it has greeted"
        assert self._link is not None, "it has sent a message"
        binding = binding_of(self._link.transport)
        return proof(self._secret, side, self._ours, self._theirs, binding)

    def _open(self, described: Replica) -> None:
        self.device, self.name = described.device, described.name
        self.exports = described.exports
        if reason := self._engines.opened(self, described):
            self._refuse(reason)
            return
        self._is_open, self.is_draining, self._problem = True, False, ""
        self._pinged_at = 0.0
        # A process that has just started answers late, so that patience begins high.
        self._late_seconds = MOST_SILENT_BEATS * BEAT_SECONDS / LATE_TIMES
        log.info("engine %s: connected, on %s", self.address, self.device)
        self.clock_seconds = described.time - time.time() if described.time else 0.0
        if abs(self.clock_seconds) >= CLOCK_SECONDS:
            log.warning(
                "engine %s: its clock differs by %+.0f s; requests end in time, the "
                "times of its log are other ones", self.address, self.clock_seconds,
            )  # fmt: skip
        self._judge("")
        self.follow()

    def follow(self) -> None:
        """Subscribe to its cached prompt blocks, if its version publishes them."""
        if self._theirs is not None and self._theirs.version >= TELLS_PREFIXES:
            self.send(Follow())

    def hold(self, *, is_held: bool) -> None:
        """Give it no requests, or give it some again."""
        self.is_held = is_held
        if self.state in (State.READY, State.WARMING, State.DRAINING):
            self._judge("")

    def warmed(self) -> None:
        """Give it requests from now on, if it was warming up."""
        self.is_warming = False
        if self.state is State.WARMING:
            self._judge("")

    def _refuse(self, reason: str) -> None:
        if (self.state, self.reason) != (State.REFUSED, reason):
            log.warning("engine %s is not used: %s", self.address, reason)
            self._engines.refused(self)
        self._set(State.REFUSED, reason)
        if self._link is not None:
            self._link.close()

    def _fail(self, reason: str) -> None:
        if (self.state, self.reason) != (State.ABSENT, reason):
            log.warning("engine %s: %s", self.address, reason)
        self._set(State.ABSENT, reason)

    def _set(self, state: State, reason: str) -> None:
        before, self.state, self.reason = self.state, state, reason
        if before is not state:
            self.changed_at = time.monotonic()
        if before is not state and self._is_open:
            if state is State.SILENT:
                log.warning("engine %s: %s", self.address, reason)
            elif before is State.SILENT and state is State.READY:
                log.info("engine %s: answers again", self.address)
            self._engines.changed(self)

    def _close(self) -> None:
        if self._link is not None:
            self._link.abort()
            self._link = None
        if self._is_open:
            self._is_open = False
            self._engines.lost(self)
