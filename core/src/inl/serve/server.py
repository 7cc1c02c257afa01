"""Runs the application on a socket until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import uvicorn

from inl.errors import RequestError
from inl.serve.app import make_app
from inl.serve.metrics import Metrics
from inl.serve.models import Models
from inl.switch_interval import SHORT_SECONDS, switch_interval

if TYPE_CHECKING:
    from collections.abc import Callable

    from inl.config import EngineConfig
    from inl.serve.model_slot import ModelSource
    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import Tracing

BACKLOG = 2048


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
        self.config = config
        self._tracing = tracing
        metrics = Metrics(vllm_names=config.vllm_metrics)
        self.models = Models(sources, config, metrics, max_batch=max_batch)
        if len(self.models) == 1:
            self.models.default.load()
        self.app = make_app(self.models, metrics, config, tracing)
        """The ASGI application."""
        self.description = ", ".join(slot.name for slot in self.models)
        settings = uvicorn.Config(
            self.app,
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            backlog=BACKLOG,
            ssl_certfile=config.certificate,
            ssl_keyfile=config.private_key,
            timeout_graceful_shutdown=max(int(config.drain_seconds), 1),
            timeout_keep_alive=75,
        )
        self._server = _Uvicorn(settings)
        self._port = config.port

    def handle_signals(self) -> None:
        """Stop at SIGTERM and SIGINT; called by the main thread's event loop.

        On Windows also at SIGBREAK, which Ctrl-Break and the end of a session raise.
        """
        loop = asyncio.get_running_loop()

        def stop_soon(_number: int, _frame: object) -> None:
            loop.call_soon_threadsafe(self.stop)

        for name in ("SIGTERM", "SIGINT", "SIGBREAK"):
            number = getattr(signal, name, None)
            if number is None:
                continue
            try:
                loop.add_signal_handler(number, self.stop)
            except NotImplementedError:  # loops of Windows
                signal.signal(number, stop_soon)

    async def serve(self, started: Callable[[str], None]) -> None:
        """Serve until :meth:`stop`, then finish the open requests.

        started: called with the URL once connections are accepted.
        """
        listening = listen(self.config.host, self.config.port)
        self._port = listening.getsockname()[1]
        with switch_interval(SHORT_SECONDS):
            serving = asyncio.create_task(self._server.serve([listening]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            if self._server.started:
                started(self.url)
            await serving

    def close(self) -> None:
        """Unload all models. Closing twice is allowed."""
        self.models.close()
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
        if self._server.should_exit:
            self._server.force_exit = True
        self.models.drain()
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises :class:`RequestError` if it cannot be."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(
            (str(address[0]), port), family=family, backlog=BACKLOG
        )
    except OSError as error:
        raise RequestError(
            f"{host}:{port}: {error.strerror}; accepts another --host and --port"
        ) from error


class _Uvicorn(uvicorn.Server):
    """Leaves signals to :class:`Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
