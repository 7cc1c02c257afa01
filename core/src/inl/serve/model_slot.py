"""A model of the server: loaded when it is asked for, unloaded when it is idle."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inl.errors import DeviceError, InlError, ModelError, OutOfMemory
from inl.errors import message as message_of
from inl.serve.api_error import ApiError
from inl.serve.served_model import ServedModel

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.records import StepRecord
    from inl.serve.admission import Admission
    from inl.serve.generations import Generations
    from inl.serve.job import Job
    from inl.serve.metrics import ModelMetrics
    from inl.serve.wakeups import Reader

log = logging.getLogger("inl.serve")

LOAD_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemory, "there is not enough memory"),
    (MemoryError, "there is not enough memory"),
    (DeviceError, "its device is not available"),
    (ModelError, "its files cannot be used"),
    (OSError, "its files cannot be read"),
    (InlError, "it does not accept the settings of the server"),
)
"""Kind of error -> reason in the answer to clients; the first match counts."""

OpenEngine = Callable[[Callable[["StepRecord"], None]], "InferenceEngine"]
"""Loads a model; its argument is the engine's ``on_step``."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that a server offers.

    name: in requests. adapters: names of the engine's adapters, which requests use as
    names of models. place: folder, file or known name, where front-ends find its
    tokenizer; ``None`` is the default model. context: maximum number of tokens of
    prompt and output, if it is less than the model's.
    """

    name: str
    open: OpenEngine
    adapters: tuple[str, ...] = ()
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
        self.name, self.adapters = source.name, source.adapters
        self.admission = admission
        self.created = int(time.time())
        self._source = source
        self.metrics = metrics
        self._idle_seconds = idle_seconds
        self._executor = executor
        self._model: ServedModel | None = None
        self._users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._change: asyncio.Task[None] | None = None
        """Loads or unloads the model."""
        metrics.observe(admission, lambda: self.engine)

    @property
    def engine(self) -> InferenceEngine | None:
        """The engine, while the model is loaded."""
        model = self._model
        return None if model is None else model.engine

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[ServedModel]:
        """Load the model, unless it is loaded, and keep it loaded in the body.

        Raises :class:`ApiError` 503 if it cannot be loaded.
        """
        self._users += 1
        self._cancel_timer()
        try:
            yield await self._loaded()
        finally:
            self._users -= 1
            self._unload_later()

    @asynccontextmanager
    async def generate(
        self, job: Job, client: str, reader: Reader | None = None
    ) -> AsyncIterator[Generations]:
        """Admit a job, submit its prompts, and end it after the body.

        reader: as in :meth:`ServedModel.start`. Raises :class:`ApiError`.
        """
        ticket = self.admission.enter(client, job.completions)
        finished = False
        try:
            async with self.lease() as model:
                generations = await model.start(job, client, ticket, reader)
                try:
                    yield generations
                finally:
                    generations.close()
                    finished = generations.finished
        finally:
            self.admission.leave(ticket, finished=finished)

    async def _loaded(self) -> ServedModel:
        while self._model is None:
            # Shielded: the others wait for it too.
            await asyncio.shield(self._change or self._start(self._load()))
        return self._model

    def _start(self, change: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self._change = task = asyncio.create_task(change)
        task.add_done_callback(_read_exception)
        return task

    async def _load(self) -> None:
        try:
            await self._in_thread(self.load)
        except Exception as error:
            raise load_failure(self.name, error) from error
        finally:
            self._change = None
        self._unload_later()

    def load(self) -> None:
        """Load the model; raises the engine's errors. Called once at a time."""
        began = time.perf_counter()
        engine = self._source.open(self.metrics.record_step)
        try:
            model = ServedModel(engine, self.admission, self.metrics)
            model.warm_up()
        except BaseException:
            engine.close()
            raise
        self.metrics.record_load(engine)
        self._model = model
        seconds = time.perf_counter() - began
        log.info("%s on %s loaded in %.2f s", self.name, engine.device, seconds)

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
        gc.collect()
        log.info("%s unloaded", self.name)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, work)


def load_failure(name: str, error: Exception) -> ApiError:
    """Log that a model could not be loaded, and return the error for clients."""
    trace = None if isinstance(error, InlError) else error
    log.error("model %s: loading failed: %s", name, message_of(error), exc_info=trace)
    return ApiError(
        503,
        f"model: {name!r} could not be loaded: {_plain(error)}; the log of the server "
        "says more",
        param="model",
        code="model_load_failed",
    )


def _plain(error: Exception) -> str:
    """Return the kind of an error. Its message may have paths of this machine."""
    for kind, text in LOAD_FAILURES:
        if isinstance(error, kind):
            return text
    return "internal error"


def _read_exception(task: asyncio.Task[None]) -> None:
    """Mark the error of a load as read, which all who wait for it get."""
    if not task.cancelled():
        task.exception()
