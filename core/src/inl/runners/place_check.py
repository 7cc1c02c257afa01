"""Checks a place before a model is loaded there: versions, clock, device and files."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inl.backend.rank_sockets import split_address
from inl.dtypes import SIZES, cast
from inl.errors import InlError, ProtocolError, RunnerError
from inl.placement.ranks import collectives_of
from inl.protocol import wire_json
from inl.protocol.wire import Frame, Kind
from inl.workers.place import start_worker

if TYPE_CHECKING:
    from inl.workers.address import WorkerAddress

PINGS = 5
"""Questions for the clock; the fastest answer counts."""
ANSWER_SECONDS = 60.0
"""Time for one answer: interpreters start and digests are read from cold disks."""
SMALL_BYTES, LARGE_BYTES = 1 << 12, 1 << 24
"""Of sums that are timed: as of a decoding row, and of a step of prompts."""
SMALL_CALLS, LARGE_CALLS, ROUNDS = 20, 3, 4
"""Sums that are timed together, and how often; the first time does not count."""
REACH_SECONDS = 5.0
"""Time for another host to answer."""


def inspect(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the process of a worker finds; called there.

    asked: "device": a name; "model": a path; "reach": the HOST:PORT of another rank;
    "exchange": arguments of :func:`measure_exchange`. Each may be absent.
    """
    found: dict[str, Any] = {"clock": time.time()}
    for name, check in (
        ("device", _check_device),
        ("model", _digest),
        ("reach", _reach),
    ):
        if name in asked:
            try:
                found[name] = check(str(asked[name]))
            except (InlError, OSError) as error:
                found[f"{name}_problem"] = str(error)
    if "exchange" in asked:
        try:
            found["exchange"] = measure_exchange(**asked["exchange"])
        except (InlError, OSError, TypeError) as error:
            found["exchange_problem"] = str(error)
    return found


def measure_exchange(device: str, rank: Any) -> dict[str, list[float]]:
    """Join a group, and return the seconds of a small and a large sum along each axis.

    Of :data:`SMALL_BYTES` and :data:`LARGE_BYTES`, in the backend's own collectives.
    rank: as JSON. All ranks make this call. Raises as
    :func:`~inl.runners.rank_startup.joined_backend`.
    """
    from inl.plugin import make_backend
    from inl.runners.rank_startup import joined_backend, read_rank

    place = read_rank(rank)
    backend = joined_backend(make_backend(device), place)
    collectives = collectives_of(backend)
    if collectives is None:
        raise RunnerError(f"{device}: joined ranks without collectives")

    dtype = backend.traits.dtypes[0]

    def seconds(size: int, calls: int, axis: str) -> float:
        x = backend.tensor(cast(np.ones((1, size // SIZES[dtype])), dtype))
        one = backend.tensor(cast(np.ones((1, 16)), dtype))
        times = []
        for _ in range(ROUNDS):
            backend.numpy(collectives.all_reduce(one, axis))
            began = time.perf_counter()
            for _ in range(calls):
                collectives.all_reduce(x, axis)
            # Waits for the device, on which sums are computed in order.
            backend.numpy(collectives.all_reduce(one, axis))
            times.append((time.perf_counter() - began) / (calls + 1))
        return min(times[1:])

    return {
        axis: [
            seconds(SMALL_BYTES, SMALL_CALLS, axis),
            seconds(LARGE_BYTES, LARGE_CALLS, axis),
        ]
        for axis, _ in place.axes
    }


def _check_device(name: str) -> str:
    from inl.plugin import check_device

    return str(check_device(name))


def _digest(path: str) -> str:
    from inl.checkpoints.digest import model_digest
    from inl.executor.model_loader import open_model

    return model_digest(open_model(path).checkpoint)


def _reach(address: str) -> str:
    """Connect to a port without a listener yet, so that a refusal shows a route."""
    with suppress(ConnectionRefusedError):
        socket.create_connection(split_address(address), REACH_SECONDS).close()
    return address


class PlaceReport(NamedTuple):
    """What a worker has found at its place."""

    process: int
    """Process id, on its host."""
    core: str
    """Version of inl-core there."""
    python: str
    clock_ahead: float
    """Seconds by which its clock is ahead of this host's, but for half of the next."""
    round_trip: float
    """Seconds of the fastest question and answer."""
    rank_address: str
    """HOST:PORT at which other ranks would reach it; empty for a child process."""
    found: Mapping[str, Any]
    """See :func:`inspect`."""


class PlaceCheck:
    """A worker that loads nothing; close it.

    model: path of its files there. seconds: time for the worker to connect. abandoned:
    ends the waiting once it is set. Raises as
    :func:`~inl.workers.place.start_worker`, and :class:`~inl.errors.ProtocolError` if
    it has another protocol.
    """

    def __init__(
        self,
        address: WorkerAddress,
        model: str,
        *,
        seat: int,
        seats: int,
        seconds: float,
        abandoned: threading.Event,
    ) -> None:
        self._worker = start_worker(
            address, seat=seat, seats=seats, seconds=seconds, abandoned=abandoned
        )
        self._where = f"worker {self._worker.name}"
        try:
            payload = self._receive(Kind.HELLO).payload
            hello = wire_json.check_hello(payload, self._where)
            pings = [self._clock() for _ in range(PINGS)]
            trip, ahead = min(pings)
            self.report = PlaceReport(
                process=self._worker.pid,
                core=str(hello.get("core")),
                python=str(hello.get("python")),
                clock_ahead=ahead,
                round_trip=trip,
                rank_address=str(hello.get("rank_address", "")),
                found=self.ask(device=address.device, model=model),
            )
        except BaseException:
            self._worker.stop(0.0)
            raise

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Let the worker :func:`inspect` something."""
        self._worker.channel.send(Kind.CHECK, wire_json.text(asked))
        payload = self._receive(Kind.CHECK).payload
        return wire_json.read_text(payload, f"{self._where}: CHECK")

    def _clock(self) -> tuple[float, float]:
        """Return the time of a question and its answer, and how far the clock is."""
        began = time.monotonic(), time.time()
        clock = self.ask().get("clock")
        trip = time.monotonic() - began[0]
        if not isinstance(clock, float | int):
            raise ProtocolError(f"{self._where}: CHECK: found the clock {clock!r:.40}")
        return trip, clock - (began[1] + trip / 2)

    def _receive(self, kind: Kind) -> Frame:
        try:
            frame = self._worker.channel.receive(ANSWER_SECONDS)
        except EOFError:
            raise self._worker.lost("checking its place") from None
        if frame is None:
            how = f"sent nothing for {ANSWER_SECONDS:g} s, and was stopped,"
            raise self._worker.lost("checking its place", how=how)
        if frame.kind is Kind.ERROR:
            raise wire_json.read_failure(frame.payload, self._where)
        if frame.kind is not kind:
            raise ProtocolError(
                f"{self._where}: found {frame.kind.name}, expected {kind.name}"
            )
        return frame

    def close(self) -> None:
        """End the worker."""
        with suppress(EOFError):
            self._worker.channel.send(Kind.CLOSE)
        self._worker.stop()
