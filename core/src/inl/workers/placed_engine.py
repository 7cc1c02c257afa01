"""A whole engine at a place: started as a worker is, it answers front-ends itself.

The server sends it OPEN with its settings; it answers READY with its address before it
loads the model, and ends after CLOSE once its requests have.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from inl.errors import DeviceError, RunnerError, WorkerLost
from inl.protocol import wire_json
from inl.protocol.wire import Channel, Kind
from inl.workers.address import WorkerAddress
from inl.workers.handshake import ANY_SEAT, join
from inl.workers.heartbeat_process import start_heartbeat
from inl.workers.place import start_worker
from inl.workers.settings import ADDRESS, SEAT, read_secret, show_address

WITHOUT = {
    "worker": "its interpreter is this host's: start engines with --replicas alone",
    "join": "inl worker computes for an engine and serves none: start engines there "
    "with inl serve --engine-only, and name them with --replica",
}
"""Places that start no engines, and what to do."""

OPEN_SECONDS = 120.0
"""Time to say the address, before the model is loaded."""

JOIN_SECONDS = 60.0

GRACE_SECONDS = 2.0
"""Time for an engine to end once its server has."""


def check_place(scheme: str) -> None:
    """Raise :class:`~inl.errors.DeviceError` for a place that starts no engines."""
    if scheme in WITHOUT:
        raise DeviceError(f"--place {scheme}: is not supported: {WITHOUT[scheme]}")


class PlacedEngine:
    """One engine, and what ends with it.

    Waits until it has said where front-ends reach it; it loads its model then. main:
    its module. settings: what that reads, as JSON-like data. seat: number among the
    engines of this process. Raises :class:`~inl.errors.DeviceError` and
    :class:`~inl.errors.WorkerLost`.
    """

    def __init__(
        self,
        place: WorkerAddress,
        main: str,
        settings: Mapping[str, Any],
        seat: int,
    ) -> None:
        self._worker = worker = start_worker(place, seat=seat, main=main)
        self.name = worker.name
        try:
            # Paths and devices have names.
            payload = json.dumps(settings, default=str).encode()
            worker.channel.send(Kind.OPEN, payload)
            frame = worker.channel.receive(OPEN_SECONDS)
            if frame is None or frame.kind is not Kind.READY:
                raise worker.lost("saying its address")
            said = wire_json.read_text(frame.payload, f"engine {worker.name}: READY")
            self.address = str(said["address"])
        except EOFError as error:
            raise worker.lost("saying its address") from error
        except BaseException:
            worker.stop(0.0)
            raise

    def is_alive(self) -> bool:
        """Return whether it runs, as far as the place knows."""
        return self._worker.alive

    def lost(self) -> WorkerLost:
        """End it if it still runs; returns an error with its last output."""
        return self._worker.lost("serving")

    def stop(self, seconds: float) -> None:
        """Let it finish its requests for so long, and end it."""
        with suppress(EOFError):
            self._worker.channel.send(Kind.CLOSE)
        self._worker.stop(seconds)


class Parent:
    """The server that has started this engine.

    Joins it as the environment variables of a place say, reads its settings, and says
    where this engine listens: on the address of the connection, so that the server
    reaches it. Ends the process soon after the server is lost.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        secret, address = read_secret(environment), environment.get(ADDRESS)
        if secret is None or address is None:
            raise RunnerError(f"engine: {ADDRESS} or its secret is not set")
        seat = int(environment.get(SEAT, ANY_SEAT))
        joined = join(address, secret, seat, JOIN_SECONDS)
        self._heartbeat = start_heartbeat(joined.heartbeat, lambda _: None)
        threading.Thread(target=self._exit_with_it, daemon=True).start()
        self._channel = channel = Channel(joined.frames)
        host = joined.frames.getsockname()[0]
        self.listening = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        frame = channel.receive()
        assert frame is not None, "without a time limit there is always a frame"
        self.settings = wire_json.read_text(frame.payload, "engine: OPEN")
        said = {"address": show_address(host, self.listening.getsockname()[1])}
        channel.send(Kind.READY, wire_json.text(said))
        self._stop: Callable[[], object] | None = None
        self._lost: Callable[[], object] | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def _exit_with_it(self) -> None:
        self._heartbeat.wait()
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    def _read(self) -> None:
        """Wait until the server asks for the end, and until it is lost."""
        with suppress(EOFError):
            self._channel.receive()
            if self._stop is None:
                os._exit(0)  # while the model is being loaded
            self._stop()
            self._channel.receive()
        if self._lost is not None:
            with suppress(RuntimeError):  # the loop is closed: it ends already
                self._lost()

    async def until_ended(self, stop: Callable[[], None]) -> None:
        """Wait until the server is lost; ``stop`` is called once it asks for that."""
        loop, lost = asyncio.get_running_loop(), asyncio.Event()
        self._stop = partial(loop.call_soon_threadsafe, stop)
        self._lost = partial(loop.call_soon_threadsafe, lost.set)
        await lost.wait()
