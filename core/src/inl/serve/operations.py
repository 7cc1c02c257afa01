"""Endpoints for load balancers, dashboards and operators."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import inl
from inl.engine.records import Stats
from inl.serve.event_stream import encode

if TYPE_CHECKING:
    from inl.serve.metrics import Metrics
    from inl.serve.model_slot import ModelSlot
    from inl.serve.models import Models


SUMMED = ("server_load", "running", "waiting", "queued_tokens", "rejected")
"""Values of ``/load`` that are of all models; the others are the default model's."""

NO_STEPS = Stats(0, 0, 0, 0, 0)


class Operations:
    """Endpoints that generate nothing."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self._models = models
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        get = partial(Route, methods=["GET"])
        return [
            get("/health", self.health),
            get("/ready", self.ready),
            get("/version", self.version),
            get("/load", self.load),
            get("/metrics", self.metrics),
            get("/v1/models", self.models),
            get("/v1/models/", self.models),  # an empty name is no model's
            get("/v1/models/{name:path}", self.model),
        ]

    async def health(self, _: Request) -> Response:
        """Return 200 while the process runs."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Return 200 if the next request would be answered, 503 with the reason if not.

        Of several models one suffices, unless the query names a ``model``.
        """
        if self._models.is_draining:
            return json_response({"status": "draining"}, 503)
        slots = self._models.chosen(request.query_params.get("model"))
        if all(slot.admission.is_asleep for slot in slots):
            return json_response({"status": "asleep"}, 503)
        if (reason := self._models.frontend_problem()) is not None:
            return json_response({"status": "not ready", "reason": reason}, 503)
        found = await asyncio.gather(*(slot.problem() for slot in slots))
        problems = {
            slot.name: problem
            for slot, problem in zip(slots, found, strict=True)
            if problem is not None
        }
        if len(problems) < len(slots):
            return json_response({"status": "ready"})
        reason = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        return json_response({"status": "not ready", "reason": reason}, 503)

    async def version(self, _: Request) -> Response:
        """Return the version of the server."""
        return json_response({"version": inl.__version__})

    async def load(self, _: Request) -> Response:
        """Return what the server does now."""
        loads = {slot.name: _load_of(slot) for slot in self._models}
        body = dict(loads[self._models.default.name])
        for name in SUMMED:
            body[name] = sum(load[name] for load in loads.values())
        return json_response({**body, "models": loads})

    async def metrics(self, _: Request) -> Response:
        """Return Prometheus metrics."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(), media_type=kind)

    async def models(self, _: Request) -> Response:
        """List the models."""
        data = [
            _model_body(slot, name)
            for slot in self._models
            for name in (slot.name, *slot.adapters)
        ]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Return one model."""
        name = request.path_params["name"]
        return json_response(_model_body(self._models.find(name), name))


def _model_body(slot: ModelSlot, name: str) -> dict[str, Any]:
    """Describe a model, or the adapter of a model that has this name."""
    engine = slot.engine
    parent = {} if name == slot.name else {"parent": slot.name}
    return {
        "id": name,
        "object": "model",
        "created": slot.created,
        "owned_by": "inl",
        "max_model_len": engine and engine.context,
        "sampling_defaults": engine and dict(engine.sampling_defaults),
        "is_loaded": engine is not None,
        **parent,
    }


def _load_of(slot: ModelSlot) -> dict[str, Any]:
    """Return what a model does now."""
    engine, admission = slot.engine, slot.admission
    stats = NO_STEPS if engine is None else engine.stats
    running = 0 if engine is None else engine.core.running_requests
    return {
        "server_load": admission.open,
        "running": running,
        "waiting": max(admission.open - running, 0),
        "queued_tokens": admission.queued_tokens,
        "rejected": admission.rejected,
        "drain_rate": admission.drain_rate,
        "kv_cache_usage": 0.0 if engine is None else engine.core.kv_usage,
        "preemptions": stats.preemptions,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "computed_tokens": stats.tokens,
        "steps": stats.steps,
        "context": engine and engine.context,
        "device": engine and str(engine.device),
    }


def json_response(body: Any, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(encode(body), status, media_type="application/json")
