"""Ollama's endpoints about models: ``/api/tags``, ``show``, ``ps``, ``version``."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import inl
from inl.device import DeviceType
from inl.engine.stored_models import ModelCard, read_card
from inl.serve.api_error import ApiError
from inl.serve.http_messages import parsed
from inl.serve.ollama.fields import LATEST, served_name
from inl.serve.operations import json_response

if TYPE_CHECKING:
    from inl.serve.model_slot import ModelSlot
    from inl.serve.models import Models

VERSION = "0.12.6"
"""Version of Ollama whose API this is; some clients refuse older ones."""

FOREVER = 100 * 365 * 86400.0
"""Seconds after which a model that is never unloaded is said to expire."""

UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


class ModelRequest(msgspec.Struct, kw_only=True):
    """Body of endpoints about one model; older clients send ``name``."""

    model: str | None = None
    name: str | None = None


def model_name(request: ModelRequest) -> str:
    """Return the name of a request's model; raises :class:`ApiError`."""
    if name := served_name(request.model or request.name):
        return name
    raise ApiError(400, "model: found none, needs a name", param="model")


class OllamaModels:
    """Endpoints that describe models."""

    def __init__(self, models: Models, idle_seconds: float | None) -> None:
        self._models = models
        self._idle_seconds = idle_seconds
        self._cards: dict[str, ModelCard] = {}

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        get = partial(Route, methods=["GET"])
        return [
            get("/api/version", self.version),
            get("/api/tags", self.tags),
            get("/api/ps", self.ps),
            Route("/api/show", self.show, methods=["POST"]),
        ]

    async def version(self, _: Request) -> Response:
        """Return the version of Ollama's API, and that of this server."""
        return json_response({"version": VERSION, "inl": inl.__version__})

    async def tags(self, _: Request) -> Response:
        """List the models, and the adapters that requests can name."""
        rows = []
        for slot in self._models:
            card = await self._card(slot)
            rows += [_row(name, card, slot) for name in (slot.name, *slot.adapters)]
        return json_response({"models": rows})

    async def ps(self, _: Request) -> Response:
        """List the models that are loaded."""
        rows = []
        for slot in self._models:
            engine = slot.engine
            if engine is None:
                continue
            card = await self._card(slot)
            # Of one in a worker, the device is behind its address.
            kind = str(engine.device).rpartition("/")[2].partition(":")[0]
            seconds = self._idle_seconds or FOREVER
            rows.append(
                {
                    **_row(slot.name, card, slot),
                    "expires_at": _time(time.time() + seconds),
                    "size_vram": 0 if kind == DeviceType.CPU else card.size,
                    "context_length": engine.context,
                }
            )
        return json_response({"models": rows})

    async def show(self, request: Request) -> Response:
        """Describe one model."""
        slot = self._models.find(model_name(await parsed(request, ModelRequest)))
        card = await self._card(slot)
        config = card.config
        family = str(config.get("model_type", ""))
        context = slot.engine and slot.engine.context
        info = {
            "general.architecture": family,
            "general.parameter_count": card.parameters,
            f"{family}.context_length": context
            or config.get("max_position_embeddings"),
            f"{family}.embedding_length": config.get("hidden_size"),
            f"{family}.block_count": config.get("num_hidden_layers"),
        }
        return json_response(
            {
                "modelfile": "",
                "parameters": "",
                "template": card.template,
                "modified_at": _time(card.modified or slot.created),
                "details": _details(card),
                "model_info": {k: v for k, v in info.items() if v is not None},
                "capabilities": _capabilities(card),
            }
        )

    async def _card(self, slot: ModelSlot) -> ModelCard:
        """Return what a model's files say, which are read once they are there."""
        card = self._cards.get(slot.name)
        if card is None:
            card = await asyncio.to_thread(read_card, slot.place)
            if card.size:
                self._cards[slot.name] = card
        return card


def _row(name: str, card: ModelCard, slot: ModelSlot) -> dict[str, Any]:
    tagged = name if ":" in name else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(card.modified or slot.created),
        "size": card.size,
        "digest": card.digest,
        "details": _details(card),
    }


def _details(card: ModelCard) -> dict[str, Any]:
    family = str(card.config.get("model_type", ""))
    return {
        "parent_model": "",
        "format": card.format,
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _count(card.parameters),
        "quantization_level": card.dtype.upper(),
    }


def _capabilities(card: ModelCard) -> list[str]:
    """Return what requests can ask for; tools are shown by any chat template."""
    found = ["completion"]
    if card.template:
        found.append("tools")
    if "enable_thinking" in card.template or "<think>" in card.template:
        found.append("thinking")
    return found


def _count(number: int) -> str:
    """Return a number of parameters as Ollama writes it, such as "134.5M"."""
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
