"""Endpoints for operators, which need an admin key: vLLM's names and fields."""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inl.serve.api_error import ApiError, unsupported
from inl.serve.http_messages import parsed
from inl.serve.operations import json_response

if TYPE_CHECKING:
    from inl.serve.models import Models

log = logging.getLogger("inl.serve")

PREFIX = re.compile(r"^(chatcmpl-|cmpl-|resp_|msg_)")
"""What the dialects put before the number of a request."""

PARAMETERS: dict[str, dict[str, tuple[str, ...] | None]] = {
    "/sleep": {"model": None, "level": ("1", "2"), "mode": ("wait", "abort")},
    "/wake_up": {"model": None},
    "/is_sleeping": {},
    "/reset_prefix_cache": {"model": None},
}
"""Parameters of the query of each path -> accepted values; ``None`` accepts names."""


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/abort_requests``: ids of answers, or of ``x-request-id``."""

    request_ids: Annotated[list[str], msgspec.Meta(max_length=1000)]


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/load_lora_adapter``; lora_path: a PEFT folder of the server."""

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/unload_lora_adapter``."""

    lora_name: str


BODIES: dict[str, tuple[type, str]] = {
    "/abort_requests": (AbortRequest, "Abort requests by their ids."),
    "/v1/load_lora_adapter": (LoadAdapterRequest, "Load an adapter of a model."),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, "Unload an adapter."),
}

TEXTS = {
    "/sleep": "Free the memory of models until they wake.",
    "/wake_up": "Load the models that sleep.",
    "/is_sleeping": "Return which models sleep.",
    "/reset_prefix_cache": "Forget all cached prefixes.",
}


GETS = ("/is_sleeping",)
"""Paths of :data:`PARAMETERS` that are read; the others are posted to."""


class Admin:
    """Endpoints that change models or end other clients' requests."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        post = partial(Route, methods=["POST"])
        return [
            post("/sleep", self.sleep),
            post("/wake_up", self.wake_up),
            Route("/is_sleeping", self.is_sleeping, methods=["GET"]),
            post("/reset_prefix_cache", self.reset_prefix_cache),
            post("/abort_requests", self.abort_requests),
            post("/v1/load_lora_adapter", self.load_adapter),
            post("/v1/unload_lora_adapter", self.unload_adapter),
        ]

    async def sleep(self, request: Request) -> Response:
        """Unload models once their open requests have finished or were aborted."""
        query = _query(request)
        slots = self._models.chosen(query.get("model"))
        sleeping = [asyncio.ensure_future(slot.sleep()) for slot in slots]
        await asyncio.sleep(0)  # nothing more is admitted from here on
        if query.get("mode") == "abort":
            for slot in slots:
                slot.abort()
        await asyncio.gather(*sleeping)
        return self._states()

    async def wake_up(self, request: Request) -> Response:
        """Load models that were loaded before they slept."""
        for slot in self._models.chosen(_query(request).get("model")):
            await slot.wake()
        return self._states()

    async def is_sleeping(self, request: Request) -> Response:
        """Return which models sleep."""
        _query(request)
        return self._states()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget the cached prefixes of models."""
        slots = self._models.chosen(_query(request).get("model"))
        engines = [slot.engine for slot in slots if slot.engine is not None]
        resets = [asyncio.to_thread(engine.reset_prefix_cache) for engine in engines]
        return json_response({"freed_blocks": sum(await asyncio.gather(*resets))})

    async def abort_requests(self, request: Request) -> Response:
        """End open requests with an error."""
        found = []
        for name in (await parsed(request, AbortRequest)).request_ids:
            number = PREFIX.sub("", name).partition("_")[0]
            if number and sum(slot.abort(number) for slot in self._models):
                found.append(name)
        return json_response({"aborted": found})

    async def load_adapter(self, request: Request) -> Response:
        """Load an adapter, which requests then name as their model."""
        fields = await parsed(request, LoadAdapterRequest)
        name, path = fields.lora_name, fields.lora_path
        await self._models.load_adapter(fields.model, name, path)
        log.info("adapter %s loaded from %s", name, path)
        return json_response({"lora_name": name, "status": "loaded"})

    async def unload_adapter(self, request: Request) -> Response:
        """Unload an adapter; its open requests finish."""
        fields = await parsed(request, UnloadAdapterRequest)
        await self._models.unload_adapter(fields.lora_name)
        log.info("adapter %s unloaded", fields.lora_name)
        return json_response({"lora_name": fields.lora_name, "status": "unloaded"})

    def _states(self) -> Response:
        states = {slot.name: slot.admission.is_asleep for slot in self._models}
        return json_response({"is_sleeping": self._models.is_asleep, "models": states})


def _query(request: Request) -> dict[str, str]:
    """Return the parameters of a query; raises :class:`ApiError` for others."""
    accepted = PARAMETERS[request.scope["path"]]
    for name, value in request.query_params.multi_items():
        if name not in accepted:
            names = ", ".join(accepted) or "no parameters"
            raise unsupported(name, f"is not supported; accepts {names}")
        values = accepted[name]
        if values is not None and value not in values:
            raise ApiError(
                400,
                f"{name}: found {value!r:.40}, accepts {' or '.join(values)}",
                param=name,
            )
    return dict(request.query_params)
