"""A runner in a worker process, possibly of another interpreter and environment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from inl.errors import InlError, ProtocolError, RunnerError, WorkerLost
from inl.install_command import install_command
from inl.protocol import wire_arrays, wire_json
from inl.protocol.runner import (
    AdapterSource,
    PendingRead,
    PipelinedRunner,
    Reply,
    StepInFlight,
)
from inl.protocol.wire import Frame, Kind
from inl.spec.message import Header
from inl.workers.address import WorkerAddress
from inl.workers.place import start_worker
from inl.workers.process_state import STOPPED_SECONDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from inl.progress import Progress
    from inl.spec.cache_layout import CacheLayout, Parts
    from inl.spec.encoder import TokenSequence
    from inl.spec.message import IntArray

HELLO_SECONDS = 60.0
"""Time for an interpreter to start and import the core, from a cold disk too."""

SILENT_SECONDS = 600.0
"""Time for one step, or between two reports of progress, before a worker is lost."""

POLL_SECONDS = 0.25
"""How often the process of a silent worker is checked, besides its connection."""

LAST_SECONDS = 0.2
"""How long a worker whose group has failed may show that it ends of itself."""

RETURN_HINT = (
    "set EngineConfig(on_worker_loss='restart') to go on with a fresh worker, "
    "or create another engine"
)
SLOW = "raise EngineConfig.worker_seconds if it was slow and not stuck"


@final
class WorkerRunner(PipelinedRunner):
    """Starts a worker and calls its runner over :mod:`inl.protocol.wire`.

    where: the worker's place, or the path of an interpreter for a child process.
    options: JSON object for the worker's factory, or a function of the worker's
    HOST:PORT for ranks, empty for a child process. factory: "module:function" there; by
    default a model on a device, see :func:`~inl.runners.startup.serve_model`. seat:
    number of the worker among the ``seats`` of one engine. hello_seconds: time limit of
    the start. silent_seconds: longest time without an answer to a request; then the
    process is stopped and counts as lost. advice: advice in the message of its loss.
    abandoned: once set, by any thread, the process is stopped and a waiting call raises
    :class:`~inl.errors.RunnerError`.

    ``submit`` does not wait, so errors of the worker's runner are raised by the next
    ``collect``, as their own class of :mod:`inl.errors`. After
    :class:`~inl.errors.OutOfMemory` for a step the runner goes on, after others once it
    is reset. Raises
    :class:`~inl.errors.WorkerLost` if the process is gone and
    :class:`~inl.errors.ProtocolError` if the two sides are incompatible; after either,
    every call raises RunnerError.
    """

    def __init__(
        self,
        where: str | WorkerAddress,
        options: Mapping[str, Any] | Callable[[str], Mapping[str, Any]],
        *,
        factory: str | None = None,
        seat: int = 0,
        seats: int = 1,
        progress: Progress | None = None,
        hello_seconds: float = HELLO_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        advice: str = RETURN_HINT,
        abandoned: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self.silent_seconds = silent_seconds
        self._refusal = ""
        """Message of the error that every call raises, once the worker has failed."""
        self._needs_reset = False
        """Whether it serves again once it is reset: it has sent an error of a step."""
        self._lost: WorkerLost | None = None
        self._resets = 0
        self._stopped_since = 0.0
        """When the process was first seen stopped; 0 if it runs."""
        self._advice = advice
        self._abandoned = abandoned or threading.Event()
        arguments = () if factory is None else ("--factory", factory)
        address = WorkerAddress(where, "auto") if isinstance(where, str) else where
        self._starting = "check that inl-core is installed there"
        if address.scheme == "worker":
            installs = install_command("inl-core", python=address.target)
            self._starting += f": {installs}"
        self._process = start_worker(
            address,
            arguments,
            seat=seat,
            seats=seats,
            seconds=silent_seconds,
            abandoned=self._abandoned,
        )
        self._channel = self._process.channel
        self.where = f"worker {self._process.name}"
        try:
            self._receive_hello(hello_seconds)
            ready = self._open(options, progress)
        except BaseException:
            self._process.stop(0.0)
            raise
        self.limits, self.device, self.dtype, self._layout = ready

    @property
    def pid(self) -> int:
        """Id of the worker's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker's process runs."""
        return self._process.alive

    def _receive_hello(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (frame := self._poll("starting", self._starting)) is None:
            if time.monotonic() > end:
                raise ProtocolError(
                    f"{self.where}: found no HELLO within {seconds:g} s of its start"
                )
        hello = wire_json.check_hello(self._payload(frame, Kind.HELLO), self.where)
        features = hello.get("features", ())
        self._copies = "block_io" in features
        self._encodes = "encode" in features
        self._rank_address = str(hello.get("rank_address", ""))

    def _open(
        self,
        options: Mapping[str, Any] | Callable[[str], Mapping[str, Any]],
        progress: Progress | None,
    ) -> wire_json.Ready:
        if callable(options):
            options = options(self._rank_address)
        self._send(Kind.OPEN, wire_json.text(options))
        while True:
            frame = self._wait("opening the model", self._starting)
            if frame.kind is not Kind.PROGRESS:
                payload = self._payload(frame, Kind.READY)
                return wire_json.read_ready(payload, self.where)
            report = wire_arrays.read_progress(frame.payload)
            if progress is not None:
                progress(*report)

    @property
    def cache_layout(self) -> CacheLayout | None:
        return self._layout if self._copies else None

    def _read(self, pending: PendingRead) -> Parts:
        # As in _collect.
        if pending.work != Kind.READ:
            self._send(Kind.READ)
            pending.work = Kind.READ
        frame = self._wait("reading blocks")
        try:
            return wire_arrays.read_contents(self._payload(frame, Kind.READ))
        except InlError as error:
            self._fail(error)
            self._needs_reset = frame.kind is Kind.ERROR
            raise

    def _write(self, message: IntArray, parts: Parts) -> None:
        self._send(Kind.WRITE, wire_arrays.write(message, parts))

    def _submit_frame(self, message: IntArray, head: Header) -> None:  # noqa: ARG002
        self._send(Kind.MESSAGE, wire_arrays.words(message))

    def _sample(self, flight: StepInFlight, masks: IntArray) -> None:
        self._send(Kind.MASKS, wire_arrays.masks(flight.head.step, masks))

    def _collect(self, flight: StepInFlight) -> Reply:
        # An interrupted call may have sent the request already.
        if flight.work != Kind.COLLECT:
            self._send(Kind.COLLECT)
            flight.work = Kind.COLLECT
        frame = self._wait(f"computing step {flight.head.step}")
        if frame.kind is Kind.FULL:
            raise wire_json.read_failure(frame.payload, self.where)
        try:
            return wire_arrays.read_reply(self._payload(frame, Kind.REPLY))
        except InlError as error:
            self._fail(error)
            self._needs_reset = frame.kind is Kind.ERROR
            raise

    def reset(self) -> None:
        if self._lost is not None:
            # The call that noticed the loss may have been interrupted.
            raise self._lost
        if self._needs_reset:
            self._refusal, self._needs_reset = "", False
        super().reset()

    def _reset(self) -> None:
        """Wait until the worker has processed all that was sent before."""
        self._resets += 1
        number = np.array([self._resets], "<i4")
        self._send(Kind.RESET, number.tobytes())
        frame = self._wait("resetting")
        # Replies to steps and READ, their error, and the reply to a reset that was
        # interrupted are dropped.
        while frame.kind is not Kind.RESET or frame.payload != number.tobytes():
            frame = self._wait("resetting")

    def _load_adapter(self, source: AdapterSource) -> None:
        self._send(Kind.ADAPTER, wire_json.adapter(source))
        payload = self._payload(self._wait("loading an adapter"), Kind.ADAPTER)
        if wire_json.read_text(payload, f"{self.where}: ADAPTER"):
            raise wire_json.read_failure(payload, self.where)

    def encode(self, sequences: Sequence[TokenSequence]) -> NDArray[np.float32]:
        self._check_open()
        if not self._encodes:
            raise RunnerError(
                f"{self.where}: its version of inl-core cannot encode sequences; "
                f"{self._starting}"
            )
        self._send(Kind.ENCODE, wire_arrays.sequences(sequences))
        frame = self._wait("encoding sequences")
        if frame.kind is Kind.FULL:
            raise wire_json.read_failure(frame.payload, self.where)
        try:
            payload = self._payload(frame, Kind.ENCODE)
            return wire_arrays.read_results(payload, len(sequences))
        except InlError as error:
            self._fail(error)
            self._needs_reset = frame.kind is Kind.ERROR
            raise

    def _name(self) -> str:
        return self.where

    def _disconnect(self) -> None:
        self._process.disconnect()

    def _close(self) -> None:
        if self._abandoned.is_set():
            # It would wait for a rank that is gone, to leave their group together.
            self._process.stop(0.0)
            return
        with suppress(EOFError):
            self._channel.send(Kind.CLOSE)
        self._process.stop()

    def _check_alive(self) -> None:
        if self._refusal:
            raise RunnerError(self._refusal)

    def _send(self, kind: Kind, payload: bytes | memoryview = b"") -> None:
        try:
            self._channel.send(kind, payload)
        except EOFError:
            self._lose("waiting for a step")

    def _wait(self, doing: str, *advice: str) -> Frame:
        """Wait for a frame; ``doing`` names the worker's task in errors."""
        seconds = self.silent_seconds
        end = time.monotonic() + seconds
        while (frame := self._poll(doing, *advice)) is None:
            if time.monotonic() > end:
                how = f"sent nothing for {seconds:g} s, and was stopped,"
                self._lose(doing, SLOW, how=how)
        return frame

    def _poll(self, doing: str, *advice: str) -> Frame | None:
        """Wait a moment for a frame and check that the worker is alive."""
        if self._abandoned.is_set() and self._process.alive:
            self.check_worker(doing, *advice)
            self._process.stop(0.0)
            error = RunnerError(f"{self.where}: was stopped with its group")
            self._fail(error)
            raise error
        frame = self._receive(min(POLL_SECONDS, self.silent_seconds), doing, *advice)
        # It may have sent a frame after the time limit and before its end.
        if frame is None and not self._process.alive:
            frame = self._receive(0.0, doing, *advice)
        if frame is None:
            if not self._process.alive:
                self._lose(doing, *advice)
            self._check_stopped(doing)
        return frame

    def check_worker(self, doing: str = "waiting for a step", *advice: str) -> None:
        """Raise WorkerLost if the process has ended, or ends within LAST_SECONDS.

        For the group of a failed rank: frames that it has sent are dropped.
        """
        if self._lost is not None:
            raise self._lost
        end = time.monotonic() + LAST_SECONDS
        while not self._refusal and (left := end - time.monotonic()) > 0:
            self._receive(left, doing, *advice)

    def _receive(self, seconds: float, doing: str, *advice: str) -> Frame | None:
        try:
            return self._channel.receive(seconds)
        except EOFError:
            self._lose(doing, *advice)
        except ProtocolError as error:
            self._fail(error)
            raise

    def _check_stopped(self, doing: str) -> None:
        """Give a process up that is stopped: it is not busy, and others wait for it."""
        # Workers of places that connect over TCP say it in their heartbeats.
        if not getattr(self._process, "is_stopped", False):
            self._stopped_since = 0.0
            return
        now = time.monotonic()
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since >= STOPPED_SECONDS:
            self._lose(doing, how="was stopped by a signal, and was ended,")

    def _payload(self, frame: Frame, kind: Kind) -> bytearray:
        """Return the payload of a frame of ``kind``; raises what ERROR holds."""
        if frame.kind is Kind.ERROR:
            raise wire_json.read_failure(frame.payload, self.where)
        if frame.kind is not kind:
            raise ProtocolError(
                f"{self.where}: found {frame.kind.name}, expected {kind.name}"
            )
        return frame.payload

    def _lose(self, doing: str, advice: str | None = None, how: str = "") -> NoReturn:
        advice = self._advice if advice is None else advice
        self._lost = self._process.lost(doing, advice, how)
        self._fail(self._lost)
        raise self._lost

    def _fail(self, error: InlError) -> None:
        first = str(error).splitlines()[0] if str(error) else ""
        self._refusal = f"{self.where}: failed before ({first}); create another runner"
