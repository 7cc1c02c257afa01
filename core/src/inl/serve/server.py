"""Runs the application on a socket until a signal stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from inl.errors import RequestError
from inl.serve.app import make_app, make_endpoints
from inl.serve.batches.batch_queue import BatchQueue
from inl.serve.batches.file_store import FileStore
from inl.serve.frontends.processes import FrontEnds
from inl.serve.http_server import HttpServer, listen
from inl.serve.metrics import Metrics
from inl.serve.models import Models
from inl.serve.openai.response_store import response_store
from inl.switch_interval import SHORT_SECONDS, switch_interval

if TYPE_CHECKING:
    from collections.abc import Callable

    from inl.config import EngineConfig
    from inl.engine.inference_engine import InferenceEngine
    from inl.engine.records import StepRecord
    from inl.serve.kv_events import KVEventPublisher
    from inl.serve.model_slot import ModelSource
    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import Tracing


class FrontEndPort(Protocol):
    """A port at which front-ends connect."""

    address: str
    """``HOST:PORT``."""

    async def serve(self, started: Callable[[], None]) -> None:
        """Serve until :meth:`stop`, then finish the open requests."""

    def stop(self) -> None:
        """Accept no more requests. A second call ends the open ones."""


class Server:
    """Models behind an HTTP server; a context manager that unloads them.

    A single model is loaded here, which raises the engine's errors; several ones are
    loaded when requests ask for them. max_batch: requests that each model computes at
    the same time. tracing: closed by the server.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        config: ServerConfig,
        *,
        max_batch: int,
        tracing: Tracing | None = None,
    ) -> None:
        self.config, self.max_batch = config, max_batch
        self._tracing = tracing
        metrics = Metrics(vllm_names=config.vllm_metrics)
        self.kv_events = _kv_events(config, len(sources))
        if self.kv_events is not None:
            sources = [_reporting(each, self.kv_events) for each in sources]
            missed = partial(getattr, self.kv_events, "missed")
            metrics.total("kv_event_batches_missed", {}, missed)
        self.models = Models(sources, config, metrics, max_batch=max_batch)
        if len(self.models) == 1:
            self.models.default.load()
        self.batches = _batch_queue(config, max_batch)
        self.responses = response_store(config)
        self.endpoints = make_endpoints(
            self.models, metrics, config, self.batches, self.responses
        )
        """All endpoints, without the gate."""
        self.app = make_app(self.endpoints, self.models, config, tracing)
        """The ASGI application, which front-ends do not use."""
        self.frontends: FrontEnds | None = None
        self.port: FrontEndPort | None = None
        """Where front-ends of other processes connect, in place of HTTP clients."""
        self._http: HttpServer | None = None
        self._batching: asyncio.Task[None] | None = None
        if config.frontends:
            places = {each.name: (each.place, each.context) for each in sources}
            self.frontends = FrontEnds(
                self.endpoints, self.models, config, places, self.responses
            )
            self.models.on_names = self.frontends.announce
            self.models.frontend_problem = self.frontends.problem
        else:
            self._http = HttpServer(self.app, config)
        self.description = ", ".join(slot.name for slot in self.models)
        self._port = config.port

    async def serve(self, started: Callable[[str], None]) -> None:
        """Serve until :meth:`stop`, then finish the open requests.

        started: called with the URL once connections are accepted, or the address of
        the port for front-ends.
        """

        def listening(port: int) -> None:
            self._port = port
            started(self.url)

        if self.batches is not None:
            self._batching = asyncio.create_task(self.batches.run(self.endpoints))
        try:
            with switch_interval(SHORT_SECONDS):
                if self.port is not None:
                    await self.port.serve(partial(started, self.port.address))
                    return
                if self._http is None:
                    assert self.frontends is not None, "one of them"
                    await self.frontends.run(listening)
                    return
                end = listen(self.config.host, self.config.port)
                await self._http.serve(end, partial(listening, end.getsockname()[1]))
        finally:
            if self._batching is not None:
                self._batching.cancel()
                await asyncio.wait([self._batching])

    def close(self) -> None:
        """Unload all models. Closing twice is allowed."""
        self.models.close()
        if self.batches is not None:
            self.batches.files.close()
        if self.kv_events is not None:
            self.kv_events.close()
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address, once connections are accepted."""
        scheme = "https" if self.config.certificate else "http"
        host = self.config.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port}"

    def stop(self) -> None:
        """Accept nothing more and end once all open requests have finished.

        A second call ends them.
        """
        self.models.drain()
        if self._batching is not None:
            self._batching.cancel()  # a restart goes on
        if self.port is not None:
            self.port.stop()
            return
        if self._http is not None:
            self._http.stop()
        if self.frontends is not None:
            self.frontends.stop()


def _kv_events(config: ServerConfig, models: int) -> KVEventPublisher | None:
    """Return what publishes the events of the KV cache, if it is asked for."""
    if config.kv_events is None:
        return None
    if models > 1:
        raise RequestError(
            f"--kv-events: found {models} models, accepts one; its events name none"
        )
    from inl.serve.kv_events import KVEventPublisher

    return KVEventPublisher(
        config.kv_events,
        config.kv_events_replay,
        config.kv_events_topic,
        config.kv_events_rank,
    )


def _reporting(source: ModelSource, publisher: KVEventPublisher) -> ModelSource:
    """Return a source whose engine reports to a publisher."""

    def open_engine(on_step: Callable[[StepRecord], None]) -> InferenceEngine:
        engine = source.open(on_step)
        engine.report_kv_events(publisher.put)
        return engine

    return replace(source, open=open_engine)


def _batch_queue(config: ServerConfig, max_batch: int) -> BatchQueue | None:
    """Return the batches of the server's folder; ``None`` without one."""
    if config.files is None:
        return None
    files = FileStore(
        Path(config.files),
        config.max_file_bytes,
        keys=max(len(set(config.api_keys)), 1),
        max_key_bytes=config.max_file_bytes_per_key,
    )
    # Half, so that other requests find a place.
    return BatchQueue(files, concurrency=max(max_batch // 2, 1))


def engine_config(
    config: EngineConfig, server: ServerConfig, max_batch: int
) -> EngineConfig:
    """Return the settings of an engine whose queue the server bounds."""
    return replace(
        config,
        max_batch=max_batch,
        max_queued_requests=max_batch + server.max_queue + 1,
        max_queued_tokens=2**61,
    )
