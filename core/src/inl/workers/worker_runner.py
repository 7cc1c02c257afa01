"""A runner in another interpreter, with its own environment and its own inl-core."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, final

from inl.errors import InlError, ProtocolError, RunnerError
from inl.protocol import wire_values
from inl.protocol.runner import Reply, Runner
from inl.protocol.wire import Frame, Kind
from inl.spec.message import MASKED, STEP, header
from inl.workers.process import WorkerProcess

if TYPE_CHECKING:
    from inl.spec.message import IntArray
    from inl.weights.progress import Progress

HELLO_SECONDS = 60.0
"""Time for an interpreter to start and import the core, from a cold disk too."""

SILENT_SECONDS = 600.0
"""Time for one step, or between two words of progress, before a worker is given up."""

BEAT_SECONDS = 1.0
"""How often a silent worker's process is looked at, besides its connection."""

RETURN_HINT = (
    "set EngineConfig(on_worker_loss='restart') to go on with a fresh worker, "
    "or make another engine"
)
SLOW = "raise EngineConfig.worker_seconds if it was slow and not stuck"
STARTING = "see that inl-core is installed there: PYTHON -m pip install inl-core"


@final
class WorkerRunner(Runner):
    """Starts a worker process and speaks to it over :mod:`inl.protocol.wire`.

    python: path of the interpreter. options: what its factory is to serve, JSON.
    factory: "module:function" there; by default a model on a device, see
    :func:`~inl.workers.startup.serve_model`. silent_seconds: how long it may say
    nothing while something is asked of it; then it is ended and counts as lost.
    advice: what the error of its loss suggests. abandoned: once set, by any thread, the
    worker is ended and who waits for it gets a :class:`~inl.errors.RunnerError`.

    ``submit`` does not wait, so what the runner over there refuses is raised by the
    next ``collect``, as its own class of :mod:`inl.errors`. After
    :class:`~inl.errors.OutOfMemory` for a step it goes on. Raises
    :class:`~inl.errors.WorkerLost` once the process is gone,
    :class:`~inl.errors.ProtocolError` where the two sides do not understand each other.
    After either, every call refuses.
    """

    def __init__(
        self,
        python: str,
        options: Mapping[str, Any],
        *,
        factory: str | None = None,
        progress: Progress | None = None,
        hello_seconds: float = HELLO_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        advice: str = RETURN_HINT,
        abandoned: threading.Event | None = None,
    ) -> None:
        self._flying: deque[int] = deque()
        self._masked: int | None = None
        self._asked = False
        self._refusal = ""
        self._silent_seconds, self._advice = silent_seconds, advice
        self._abandoned = abandoned or threading.Event()
        self._beat_seconds = min(BEAT_SECONDS, silent_seconds)
        arguments = () if factory is None else ("--factory", factory)
        self._process = WorkerProcess(python, arguments)
        self._channel = self._process.channel
        self.where = f"worker {python}"
        try:
            self._greet(hello_seconds)
            ready = self._open(options, progress)
        except BaseException:
            self._process.stop(0.0)
            raise
        self.limits, self.device, self.dtype = ready

    @property
    def pid(self) -> int:
        """Id of the worker's process."""
        return self._process.pid

    def _greet(self, seconds: float) -> None:
        doing = "starting"
        end = time.monotonic() + seconds
        while (frame := self._beat(doing, STARTING)) is None:
            if time.monotonic() > end:
                raise ProtocolError(
                    f"{self.where}: said nothing for {seconds:g} s after its start; "
                    "expected HELLO"
                )
        wire_values.check_hello(self._expect(frame, Kind.HELLO), self.where)

    def _open(
        self, options: Mapping[str, Any], progress: Progress | None
    ) -> wire_values.Ready:
        self._send(Kind.OPEN, wire_values.text(options))
        while True:
            frame = self._wait("opening the model", STARTING)
            if frame.kind is not Kind.PROGRESS:
                return wire_values.read_ready(
                    self._expect(frame, Kind.READY), self.where
                )
            done = wire_values.read_progress(frame.payload)
            if progress is not None:
                progress(*done)

    def submit(self, message: IntArray) -> None:
        self._check_open()
        found = header(message)
        self._check_unmasked()
        if found.kind == STEP:
            if len(self._flying) >= self.limits.depth:
                raise ProtocolError(
                    f"step {found.step}: {len(self._flying)} steps are in flight, "
                    f"the limit is {self.limits.depth}"
                )
            self._masked = found.step if found.flags & MASKED else None
            self._flying.append(found.step)
        self._send(Kind.MESSAGE, wire_values.words(message))

    def sample(self, step: int, masks: IntArray) -> None:
        self._check_open()
        if self._masked is None or self._masked != step:
            raise ProtocolError(f"step {step}: no masks were announced for it")
        self._masked = None
        self._send(Kind.MASKS, wire_values.masks(step, masks))

    def collect(self) -> Reply:
        self._check_open()
        if not self._flying:
            raise ProtocolError("collect: no step is in flight")
        if self._masked == self._flying[0]:
            self._check_unmasked()
        # An earlier call may have been interrupted after it had asked.
        if not self._asked:
            self._send(Kind.COLLECT)
            self._asked = True
        doing = f"computing step {self._flying[0]}"
        frame = self._wait(doing)
        if frame.kind is Kind.FULL:
            self._asked = False
            self._flying.popleft()
            raise wire_values.read_failure(frame.payload, self.where)
        try:
            reply = wire_values.read_reply(self._expect(frame, Kind.REPLY))
        except InlError as error:
            self._fail(error)
            raise
        self._asked = False
        self._flying.popleft()
        return reply

    def close(self) -> None:
        self._refusal = self._refusal or f"{self.where}: is closed"
        with suppress(EOFError):
            self._channel.send(Kind.CLOSE)
        self._process.stop()

    def _check_open(self) -> None:
        if self._refusal:
            raise RunnerError(self._refusal)

    def _check_unmasked(self) -> None:
        if self._masked is not None:
            raise ProtocolError(
                f"step {self._masked} waits for its masks: call sample first"
            )

    def _send(self, kind: Kind, payload: bytes | memoryview = b"") -> None:
        try:
            self._channel.send(kind, payload)
        except EOFError:
            self._lose("waiting for a step")

    def _wait(self, doing: str, *advice: str) -> Frame:
        seconds = self._silent_seconds
        end = time.monotonic() + seconds
        while (frame := self._beat(doing, *advice)) is None:
            if time.monotonic() > end:
                how = f"said nothing for {seconds:g} s, and was stopped,"
                self._lose(doing, SLOW, how=how)
        return frame

    def _beat(self, doing: str, *advice: str) -> Frame | None:
        """Wait a moment for a frame and see that the worker is alive."""
        if self._abandoned.is_set() and self._process.alive:
            self._process.stop(0.0)
            error = RunnerError(f"{self.where}: was stopped with its group")
            self._fail(error)
            raise error
        try:
            frame = self._channel.receive(self._beat_seconds)
            # It may have spoken between the time's end and its own.
            if frame is None and not self._process.alive:
                frame = self._channel.receive(0.0)
        except EOFError:
            self._lose(doing, *advice)
        except ProtocolError as error:
            self._fail(error)
            raise
        if frame is None and not self._process.alive:
            self._lose(doing, *advice)
        return frame

    def _expect(self, frame: Frame, kind: Kind) -> bytearray:
        if frame.kind is Kind.ERROR:
            raise wire_values.read_failure(frame.payload, self.where)
        if frame.kind is not kind:
            raise ProtocolError(
                f"{self.where}: found {frame.kind.name}, expected {kind.name}"
            )
        return frame.payload

    def _lose(self, doing: str, advice: str | None = None, how: str = "") -> NoReturn:
        advice = self._advice if advice is None else advice
        error = self._process.lost(doing, advice, how)
        self._fail(error)
        raise error

    def _fail(self, error: InlError) -> None:
        first = str(error).splitlines()[0] if str(error) else ""
        self._refusal = f"{self.where}: failed before ({first}); make another runner"
