"""Places: how workers are started, and how an engine waits for one.

A place is a function ``start(request) -> Started`` that a plugin registers by
``inl_register_places``. Wherever it starts the worker, the worker connects back to the
engine; see :mod:`inl.workers.handshake`.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

from inl.errors import DeviceError, InlError, PluginError, RunnerError, WorkerLost
from inl.plugin import builtin_registry, registry
from inl.plugin.contribution import describe
from inl.protocol.wire import Channel
from inl.workers.address import WorkerAddress
from inl.workers.handshake import Joined
from inl.workers.heartbeat import Heartbeat
from inl.workers.listener import Seat
from inl.workers.settings import ADDRESS, SEAT, SECRET, read_secret

MAIN = "inl.runners.worker_main"
LOOPBACK = "127.0.0.1:0"
POLL_SECONDS = 0.1
OUTPUT_LINES = 12
"""Lines of a worker's last output in the message of its loss."""


@runtime_checkable
class Started(Protocol):
    """A worker that a place has started."""

    @property
    def name(self) -> str:
        """What and where it is, such as "pod inl-3 on node-7", for messages."""

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as the place knows."""

    @property
    def log_tail(self) -> str:
        """Its last output, for the message of its loss; empty if it is not known."""

    def stop(self, seconds: float) -> None:
        """Wait so long for its end, then end it. Stopping twice is allowed."""


@runtime_checkable
class Worker(Protocol):
    """A worker with the channel to it."""

    channel: Channel

    @property
    def name(self) -> str:
        """What and where it is."""

    @property
    def pid(self) -> int:
        """Process id, on its host."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""

    def lost(self, doing: str, advice: str = "", how: str = "") -> WorkerLost:
        """End it if it still runs; returns an error with its last output."""

    def disconnect(self) -> None:
        """Leave it to the parent, in a forked child."""

    def stop(self, seconds: float = 5.0) -> None:
        """Wait for its end, then end it. Stopping twice is allowed."""


class Request:
    """A worker to start. Later versions may add attributes.

    A place runs a Python with ``inl-core`` and the device's plugin, with
    :attr:`arguments` and, added to its environment, :attr:`environment`. The latter has
    the secret: never write it on a command line, where other users see it.
    """

    def __init__(
        self,
        address: WorkerAddress,
        seat: int = 0,
        options: Sequence[str] = (),
        main: str = MAIN,
        seats: int = 1,
    ) -> None:
        self.target = address.target
        """What the device's name has between scheme and device, such as an image;
        empty if it has nothing."""
        self.device = address.device
        """The device that it computes on."""
        self.devices = address.devices
        """How many it drives: that one and those after it."""
        self.seat = seat
        """Number of the worker among those of this engine."""
        self.seats = max(seats, seat + 1)
        """How many workers this engine starts at a time."""
        self.options = tuple(options)
        """Further arguments of the worker's main program."""
        self._main = main
        self._opened: Seat | None = None

    @property
    def address(self) -> str:
        """``HOST:PORT`` of the engine, opened when it is first read.

        On the loopback interface unless INL_WORKER_ADDRESS says otherwise.
        """
        return self.awaited_at.address

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables by which the worker finds the engine; one is secret."""
        return {
            ADDRESS: self.address,
            SECRET: self.awaited_at.secret.hex(),
            SEAT: str(self.seat),
        }

    @property
    def arguments(self) -> Sequence[str]:
        """Arguments of the Python interpreter; without secrets."""
        return "-m", self._main, "--connect", *self.options

    @cached_property
    def shared_secret(self) -> bytes | None:
        """The secret that the user has set; ``None``: one is made for this worker."""
        return read_secret(os.environ)

    def listen(self, address: str) -> str:
        """Open the port at another address, ``HOST:PORT``; returns it."""
        if self._opened is not None:
            raise DeviceError(f"{address}: this worker is awaited at {self.address}")
        secret = self.shared_secret or secrets.token_bytes(32)
        self._opened = Seat(address, self.seat, secret, self.seats)
        return self._opened.address

    @property
    def awaited_at(self) -> Seat:
        """The worker's seat at the open port."""
        if self._opened is None:
            self.listen(os.environ.get(ADDRESS, LOOPBACK))
        assert self._opened is not None, "listen opens it"
        return self._opened

    def close(self) -> None:
        """Close the port."""
        if self._opened is not None:
            self._opened.close()


def start_worker(
    address: WorkerAddress,
    options: Sequence[str] = (),
    *,
    seat: int = 0,
    seats: int = 1,
    seconds: float = 600.0,
    abandoned: threading.Event | None = None,
    main: str = MAIN,
) -> Worker:
    """Start a worker at a place, and wait until it has connected.

    seat: its number among ``seats`` workers that are started together. abandoned: ends
    the waiting once it is set. main: module of its main program. Raises
    :class:`~inl.errors.DeviceError` if it cannot be started there, and
    :class:`~inl.errors.WorkerLost` if it does not connect in so many seconds.
    """
    known = builtin_registry()
    if address.scheme not in known.names("place"):
        known = registry()
    try:
        origin, start = known.function("place", address.scheme)
    except PluginError as error:
        raise DeviceError(f"{address}: {error}") from error
    request = Request(address, seat, options, main, seats)
    try:
        started = start(request)
        if isinstance(started, Worker):
            return started
        if not isinstance(started, Started):
            raise DeviceError(
                f"{address}: {origin} returned {type(started).__name__}, accepted: an "
                "inl.workers.place.Started"
            )
        return PlacedWorker(started, request, seconds, abandoned or threading.Event())
    except BaseException as error:
        request.close()
        if isinstance(error, InlError) or not isinstance(error, Exception):
            raise
        raise DeviceError(
            f"{address}: {origin} cannot start a worker: {describe(error)}"
        ) from error


class PlacedWorker:
    """A worker that a place has started, connected over TCP."""

    def __init__(
        self,
        started: Started,
        request: Request,
        seconds: float,
        abandoned: threading.Event,
    ) -> None:
        self._started = started
        self._request = request
        self._heartbeat: Heartbeat | None = None
        self._stopped = False
        try:
            joined = self._wait(seconds, abandoned)
            self.pid = joined.pid
            self.peer = joined.peer
            self.channel = Channel(joined.frames)
            self._heartbeat = Heartbeat(joined.heartbeat, self._cut)
        except BaseException:
            self.stop(0.0)
            raise

    @property
    def name(self) -> str:
        return self._started.name

    def _wait(self, seconds: float, abandoned: threading.Event) -> Joined:
        seat = self._request.awaited_at
        end = time.monotonic() + seconds
        while (joined := seat.joined(POLL_SECONDS)) is None:
            if abandoned.is_set():
                raise RunnerError(f"worker {self.name}: was stopped with its group")
            if not self._started.alive:
                raise WorkerLost(
                    f"worker {self.name}: ended before it had connected to "
                    f"{seat.address}. {self._output()}"
                )
            if time.monotonic() > end:
                raise WorkerLost(
                    f"worker {self.name}: did not connect to {seat.address} within "
                    f"{seconds:g} s. {self._output()}"
                )
        return joined

    def _cut(self, reason: str) -> None:  # noqa: ARG002 - kept by the heartbeat
        """Wake a caller that waits for a frame of the lost worker."""
        self.channel.shutdown()

    @property
    def alive(self) -> bool:
        beats = self._heartbeat is not None and not self._heartbeat.loss
        return beats and not self._stopped and self._started.alive

    def _output(self) -> str:
        try:
            tail = self._started.log_tail
        except Exception as error:
            tail = describe(error)
        lines = tail.splitlines()[-OUTPUT_LINES:]
        return "Its last output:" + (
            "".join(f"\n    {line}" for line in lines) or " nothing"
        )

    def lost(self, doing: str, advice: str = "", how: str = "") -> WorkerLost:
        heartbeat = self._heartbeat
        if not how and heartbeat is not None:
            # The connection for frames may have told it first.
            heartbeat.wait(1.0)
            how = heartbeat.loss
        output = self._output()
        self.stop(0.0)
        return WorkerLost(
            f"worker {self.name} (process {self.pid} at {self.peer}): "
            f"{how or 'closed its connection'} while {doing}"
            f"{advice and f'; {advice}'}. {output}"
        )

    def disconnect(self) -> None:
        self.channel.disconnect()
        if self._heartbeat is not None:
            self._heartbeat.disconnect()

    def stop(self, seconds: float = 5.0) -> None:
        self._stopped = True
        try:
            self._started.stop(seconds)
        finally:
            if self._heartbeat is not None:
                self._heartbeat.close()
                self.channel.close()
            self._request.close()
