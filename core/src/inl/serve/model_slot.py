"""A model of the server: loaded when it is asked for, unloaded when it is idle."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inl.errors import ModelError, RequestError, RunnerError
from inl.serve.api_error import ApiError
from inl.serve.health import Health
from inl.serve.load_failure import load_failure
from inl.serve.open_call import OpenCall
from inl.serve.served_model import ServedModel

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.records import StepRecord
    from inl.serve.admission import Admission
    from inl.serve.job import Job
    from inl.serve.metrics import ModelMetrics
    from inl.serve.wakeups import Reader

log = logging.getLogger("inl.serve")

STALL_SECONDS = 30.0
"""Time without a step after which a model with open requests is not ready."""

LOST_TESTS = 3
"""Tests in a row that fail with a step before the engine of a model is loaded again."""

MOST_RELOADS, RELOAD_SECONDS = 3, 120.0
"""Times that a lost engine is loaded again, within so many seconds."""

OpenEngine = Callable[[Callable[["StepRecord"], None]], "InferenceEngine"]
"""Loads a model; its argument is the engine's ``on_step``."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that a server offers.

    name: in requests. adapters: folders by name, which requests use as name of a
    model; ``open`` leaves room for them and does not load them. place: folder, file or
    known name, where front-ends find its tokenizer; ``None`` is the default model.
    context: maximum number of tokens of prompt and output, if it is less than the
    model's.
    """

    name: str
    open: OpenEngine
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    place: str | None = None
    context: int | None = None


class ModelSlot:
    """Holds the engine of one model while it is loaded. Used by the event loop only.

    idle_seconds: time without requests after which the model is unloaded; ``None``
    keeps it. executor: loads and unloads one model at a time.
    """

    def __init__(
        self,
        source: ModelSource,
        admission: Admission,
        metrics: ModelMetrics,
        *,
        idle_seconds: float | None,
        executor: Executor,
    ) -> None:
        self.name = source.name
        self.place = source.place
        self.admission = admission
        self.created = int(time.time())
        self._source = source
        self.metrics = metrics
        self._idle_seconds = idle_seconds
        self._executor = executor
        self._model: ServedModel | None = None
        self._adapters = dict(source.adapters)
        """Folders of the adapters, some of which were loaded while the server ran."""
        self._was_loaded = False
        self.on_adapters: Callable[[], Awaitable[None]] | None = None
        """Called after the model has lost adapters while it was loaded again."""
        self._calls: set[OpenCall] = set()
        self._users = 0
        self._unused = asyncio.Event()
        """Set when the last user has left."""
        self._wakes_loaded = False
        self._timer: asyncio.TimerHandle | None = None
        self._change: asyncio.Task[None] | None = None
        """Loads or unloads the model."""
        self._is_loading = False
        self._health = Health(self.name, self._test)
        self._failed_steps = 0
        """Those of the engine that have been followed by a test."""
        self._lost_tests = 0
        self._reloads: deque[float] = deque(maxlen=MOST_RELOADS)
        metrics.observe(admission, lambda: self.engine)

    def identity_of(self, model: str | None) -> str:  # noqa: ARG002 - none has one
        """Return nothing: streams end with their connections."""
        return ""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._adapters)

    @property
    def engine(self) -> InferenceEngine | None:
        """The engine, while the model is loaded."""
        model = self._model
        return None if model is None else model.engine

    @property
    def _is_lost(self) -> bool:
        """Whether the engine is loaded, but will serve no further request."""
        engine = self.engine
        if engine is None:
            return False
        return engine.failure is not None or self._lost_tests >= LOST_TESTS

    async def problem(self) -> str | None:
        """Return why the next request may not be answered soon; ``None`` if it will."""
        engine = self.engine
        if self.admission.is_asleep:
            return "asleep"
        if engine is not None and (seconds := engine.stalled_seconds) > STALL_SECONDS:
            return f"no step has ended for {seconds:.0f} s"
        if engine is not None and engine.core.failed_steps != self._failed_steps:
            self._failed_steps = engine.core.failed_steps
            self._health.suspect("a step failed")
        if self._is_loading:
            return self._health.problem or "is being loaded"
        return await self._health.verdict()

    async def _test(self) -> None:
        """Do what a request needs."""
        async with self._leased() as model:
            core = model.engine.core
            failed = core.failed_steps
            try:
                await model.test()
            except BaseException:
                is_lost = core.failed_steps > failed
                self._lost_tests = self._lost_tests + 1 if is_lost else 0
                raise
            # Steps that failed meanwhile were those of other requests.
            self._lost_tests = 0

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[ServedModel]:
        """Load the model, unless it is loaded, and keep it loaded in the body.

        Raises :class:`ApiError` 503 if it is asleep or cannot be loaded. An error of
        the body that is the server's fault is followed by a test.
        """
        try:
            async with self._leased() as model:
                yield model
        except Exception as error:
            self._health.judge(error)
            raise

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[ServedModel]:
        self.admission.check_awake()
        self._users += 1
        self._cancel_timer()
        try:
            yield await self._loaded()
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()
            self._unload_later()

    @asynccontextmanager
    async def generate(
        self, job: Job, client: str, reader: Reader | None = None
    ) -> AsyncIterator[OpenCall]:
        """Admit a job, submit its prompts, and end it after the body.

        reader: as in :meth:`ServedModel.start`. Raises :class:`ApiError`.
        """
        call = OpenCall(job, client, self.admission, self.metrics)
        self.admission.enter(call)
        self._calls.add(call)
        try:
            async with self.lease() as model:
                try:
                    await model.start(call, reader)
                    yield call
                finally:
                    call.end()
        finally:
            for item in call.items:
                if item.handle.error is not None:
                    self._health.judge(item.handle.error)
            self._calls.discard(call)
            self.admission.leave(call, finished=call.finished)

    def abort(self, number: str | None = None) -> int:
        """Abort the requests of a number, or all; return how many there were."""
        found = [call for call in self._calls if number in (None, call.job.number)]
        for call in found:
            call.abort()
        return len(found)

    async def sleep(self) -> None:
        """Admit nothing, let the open requests finish, and unload the model.

        Raises :class:`ApiError` 409 if it is woken meanwhile.
        """
        if not self.admission.is_asleep:
            self._wakes_loaded = False
        self.admission.is_asleep = True
        self._health.forget()
        while self._users or self._change is not None or self._model is not None:
            if self._users:
                self._unused.clear()
                await self._unused.wait()
            elif self._change is None:
                self._wakes_loaded = True
                self._cancel_timer()
                await asyncio.shield(self._start(self._unload()))
            else:
                await asyncio.wait([self._change])
            if not self.admission.is_asleep:
                raise ApiError(409, "sleep: the model was woken before it was unloaded")
        self._health.forget()  # of errors of the requests that it waited for

    async def wake(self) -> None:
        """Admit requests, and load the model if it was loaded before it slept."""
        if not self.admission.is_asleep:
            return
        self.admission.is_asleep = False
        self._health.forget()
        if not self._wakes_loaded:
            return
        async with self.lease():
            if self._idle_seconds is None:
                # As at the start: collecting all loaded objects would pause steps.
                gc.collect()
                gc.freeze()

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter, whose name no model has; raises the engine's errors."""
        async with self.lease() as model:
            await asyncio.to_thread(model.engine.load_adapter, name, path)
        self._adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Unload one of ``adapters``; its open requests finish."""
        while self._change is not None:
            # A model that is being loaded takes the names of before.
            await asyncio.wait([self._change])
        engine = self.engine
        if engine is not None:
            # One whose files were gone when a worker was replaced is unloaded already.
            with suppress(RequestError):
                await asyncio.to_thread(engine.unload_adapter, name)
        self._adapters.pop(name, None)

    async def _loaded(self) -> ServedModel:
        while self._model is None or self._change is not None or self._is_lost:
            # Shielded: the others wait for it too.
            await asyncio.shield(self._change or self._start(self._load()))
        return self._model

    def _start(self, change: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self._change = task = asyncio.create_task(change)
        task.add_done_callback(_read_exception)
        return task

    async def _load(self) -> None:
        self._is_loading = True
        try:
            if self._is_lost:
                self._count_reload()
            before = self.adapters
            await self._in_thread(self.load)
            if self.on_adapters is not None and self.adapters != before:
                await self.on_adapters()
        except Exception as error:
            failure = load_failure(self.name, error)
            self._health.suspect(failure.message)
            raise failure from error
        finally:
            self._is_loading = False
            self._change = None
        self._unload_later()

    def _count_reload(self) -> None:
        """Count that a lost engine is loaded again; raises ``RunnerError``."""
        now, times = time.monotonic(), self._reloads
        if len(times) == MOST_RELOADS and now - times[0] < RELOAD_SECONDS:
            raise RunnerError(
                f"its engine was lost {MOST_RELOADS} times within {RELOAD_SECONDS:g} s"
            )
        times.append(now)
        log.warning("model %s: its engine is lost and is loaded again", self.name)

    def load(self) -> None:
        """Load the model, also in place of a lost engine; raises the engine's errors.

        Called once at a time.
        """
        self.close()
        began = time.perf_counter()
        engine = self._source.open(self.metrics.record_step)
        try:
            self._load_adapters(engine)
            model = ServedModel(engine, self.name)
            model.warm_up()
        except BaseException:
            engine.close()
            raise
        self.metrics.record_load(engine)
        self._failed_steps = self._lost_tests = 0
        self._model, self._was_loaded = model, True
        seconds = time.perf_counter() - began
        log.info("%s on %s loaded in %.2f s", self.name, engine.device, seconds)

    def _load_adapters(self, engine: InferenceEngine) -> None:
        """Load all adapters; raises the engine's errors at the first time.

        Later the model is served without an adapter whose files are gone.
        """
        for name, path in [*self._adapters.items()]:
            try:
                engine.load_adapter(name, path)
            except ModelError as error:
                if not self._was_loaded:
                    raise
                log.error("%s: adapter %s is unloaded: %s", self.name, name, error)
                self._adapters.pop(name, None)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unload_later(self) -> None:
        if self._users or self._idle_seconds is None:
            return
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._idle_seconds, self._unload_if_idle)

    def _unload_if_idle(self) -> None:
        if not self._users and self._change is None and self._model is not None:
            self._start(self._unload())

    async def _unload(self) -> None:
        try:
            await self._in_thread(self.close)
        finally:
            self._change = None

    def close(self) -> None:
        """Unload the model. Closing twice is allowed."""
        model, self._model = self._model, None
        if model is None:
            return
        try:
            model.engine.close()
        except Exception:
            log.exception("model %s: unloading failed", self.name)
        del model
        gc.unfreeze()
        gc.collect()
        log.info("%s unloaded", self.name)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _read_exception(task: asyncio.Task[None]) -> None:
    """Mark the error of a load as read, which all who wait for it get."""
    if not task.cancelled():
        task.exception()
