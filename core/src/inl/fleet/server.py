"""One address for many engines: accepts connections and runs the dialects."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import inl
from inl.fleet.admin import FleetAdmin
from inl.fleet.client import FleetClient
from inl.fleet.dns_names import PREFIX, DnsNames
from inl.fleet.membership import Membership
from inl.fleet.metrics import FleetMetrics
from inl.serve.api_error import model_not_found
from inl.serve.app import ERROR_HANDLERS
from inl.serve.frontends.main import make_frontend_app
from inl.serve.frontends.remote import RemoteModels
from inl.serve.http_server import HttpServer, listen
from inl.serve.openai.response_store import response_store
from inl.serve.openai.responses_endpoint import stored_routes
from inl.serve.operations import json_response
from inl.serve.web_page import page_routes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from inl.fleet.local_engines import LocalEngines
    from inl.fleet.placed_engines import PlacedEngines
    from inl.fleet.plugin_router import GuardedPolicy
    from inl.fleet.replica_file import ReplicaFile
    from inl.serve.gate import Gate
    from inl.serve.settings import ServerConfig

log = logging.getLogger("inl.serve")

SHOWN_TIMES = 64
"""Newest times of ``/load``."""


class FleetServer:
    """Engines behind an HTTP server.

    addresses: of engines that were started elsewhere, or ``dns:HOST:PORT`` for all of a
    host's. secret: that they know. name, place: of the model in requests, and where its
    tokenizer is; by default as the first engine says. local: engines to start, if there
    are any. policy: of a plugin, which chooses engines. file: names further engines.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        config: ServerConfig,
        *,
        secret: bytes | None = None,
        name: str | None = None,
        place: str | None = None,
        local: LocalEngines | PlacedEngines | None = None,
        policy: GuardedPolicy | None = None,
        file: ReplicaFile | None = None,
    ) -> None:
        self.config = config
        self._responses = response_store(config)
        self.client = FleetClient(config, self._responses, policy)
        self._local, self._file = local, file
        names = [each for each in addresses if each.startswith(PREFIX)]
        self._names = DnsNames(names)
        self._addresses = list(
            dict.fromkeys(each for each in addresses if each not in names)
        )
        self.membership = Membership(
            self.client, secret, config.drain_seconds, local, file
        )
        self._name, self._place = name, place
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._is_draining = False
        self._created = int(time.time())
        self.metrics = FleetMetrics(self.client, vllm_names=config.vllm_metrics)

    async def serve(self, started: Callable[[str], None]) -> None:
        """Serve until :meth:`stop`, then finish the open requests.

        started: called with the URL once an engine is ready and connections are
        accepted.
        """
        async with self._running_engines():
            if (app := await self._application()) is not None:
                await self._serve(app, started)

    async def answer(self, use: Callable[[Gate], Coroutine[Any, Any, None]]) -> None:
        """Let ``use`` call the application, once an engine is ready.

        Nothing is listened to. Raises :class:`~inl.errors.RunnerError` if engines of
        this machine cannot be started.
        """
        async with self._running_engines():
            app = await self._application()
            assert app is not None, "nobody stops it"
            using = asyncio.create_task(use(app))
            try:
                await asyncio.wait([using, *self._tasks], return_when="FIRST_COMPLETED")
                self._check_tasks()
                await using
            finally:
                using.cancel()
                await asyncio.wait([using])

    @asynccontextmanager
    async def _running_engines(self) -> AsyncIterator[None]:
        tasks = self._tasks
        tasks.append(asyncio.create_task(self.client.members.watch()))
        try:
            for address in self._addresses:
                self.membership.use(address)
            if self._local is not None:
                tasks.append(asyncio.create_task(self._local.run()))
                self.membership.follow_local()
            if self._file is not None:
                self.membership.apply(self._file.read())
            tasks.append(asyncio.create_task(self.membership.watch()))
            if self._names:
                watching = self.membership.watch_names(self._names)
                tasks.append(asyncio.create_task(watching))
            yield
        finally:
            await self.membership.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_tasks(self) -> None:
        """Raise why engines cannot be started."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _application(self) -> Gate | None:
        """Return the application once an engine is ready; ``None`` if it stops."""
        ready = asyncio.create_task(self._until_ready())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait(
                [ready, stopping, *self._tasks], return_when="FIRST_COMPLETED"
            )
            self._check_tasks()
            if self._stopping.is_set():
                return None
            models = await ready
        finally:
            ready.cancel()
            stopping.cancel()
        if self._local is not None:
            self._local.is_started = True
        return make_frontend_app(models, self.client, self.config)

    async def _serve(self, app: Gate, started: Callable[[str], None]) -> None:
        self._http = HttpServer(app, self.config)
        end = listen(self.config.host, self.config.port)
        url = _url(self.config, end.getsockname()[1])
        await self._http.serve(end, partial(started, url))

    async def _until_ready(self) -> RemoteModels:
        """Wait for an engine, and open the tokenizer of its model."""
        client = self.client
        members = client.members
        while members.described is None:
            await members.until_changed()
        (settings,) = members.described.models
        if self._name is not None:
            settings.name = self._name
        if self._place is not None:
            settings.place = self._place
        settings.context = members.described.context
        client.names = dict.fromkeys((settings.name, *members.adapters), 0)
        models = RemoteModels([settings], client)
        await models.default.opened()
        self.description = f"{settings.name} of {len(client.engines)} engines"
        questions = client.questions
        app = questions.app = self._operations()
        paths = [getattr(route, "path", "") for route in app.routes]
        questions.own = {path for path in paths if "{" not in path}
        questions.own_under = tuple(
            path.partition("{")[0] for path in paths if "{" in path
        )
        return models

    def stop(self) -> None:
        """Accept nothing more and end once all open requests have finished.

        A second call ends them.
        """
        self._is_draining = self.client.admission.is_draining = True
        self._stopping.set()
        if self._http is not None:
            self._http.stop()

    def _operations(self) -> Starlette:
        """Return the endpoints that no engine answers."""
        get = partial(Route, methods=["GET"])
        routes = [
            get("/health", self._health),
            get("/ready", self._ready),
            get("/version", self._version),
            get("/load", self._load),
            get("/metrics", self._metrics),
            get("/v1/models", self._models),
            get("/v1/models/", self._models),
            get("/v1/models/{name:path}", self._model),
            *page_routes(),
        ]
        if self._responses is not None:
            routes += stored_routes(self._responses)
        if self.config.admin_keys:
            routes += FleetAdmin(self.membership).routes()
        return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)

    async def _health(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        """Return 200 if the next request would be answered, 503 with the reason if not.

        One engine suffices.
        """
        if self._is_draining:
            return json_response({"status": "draining"}, 503)
        if (reason := self.client.members.problem()) is not None:
            return json_response({"status": "not ready", "reason": reason}, 503)
        return json_response({"status": "ready"})

    async def _version(self, _: Request) -> Response:
        return json_response({"version": inl.__version__})

    async def _load(self, _: Request) -> Response:
        """Return what the fleet does now."""
        client, admission = self.client, self.client.admission
        described = client.members.described
        body = {
            "server_load": admission.open,
            "running": admission.open - admission.waiting,
            "waiting": admission.waiting,
            "queued_tokens": admission.queued_tokens,
            "rejected": admission.rejected,
            "drain_rate": admission.drain_rate,
            "context": described and described.context,
            "continued": client.counts["continued"],
            "continue_seconds": client.continue_seconds[-SHOWN_TIMES:],
            "replicas": self.membership.rows(),
        }
        return json_response(body)

    async def _metrics(self, _: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(), media_type=kind)

    async def _models(self, _: Request) -> Response:
        data = [self._body(name) for name in self.client.names]
        return json_response({"object": "list", "data": data})

    async def _model(self, request: Request) -> Response:
        name, names = request.path_params["name"], self.client.names
        if name not in names:
            error = model_not_found(name, names)
            return json_response(error.openai(), error.status)
        return json_response(self._body(name))

    def _body(self, name: str) -> dict[str, Any]:
        described = self.client.members.described
        assert described is not None, "before requests are accepted"
        own = next(iter(self.client.names))
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "inl",
            "max_model_len": described.context,
            "sampling_defaults": described.sampling_defaults,
            "is_loaded": self.client.members.problem() is None,
            **({} if name == own else {"parent": own}),
        }


def _url(config: ServerConfig, port: int) -> str:
    scheme, host = "https" if config.certificate else "http", config.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
