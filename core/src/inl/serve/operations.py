"""Endpoints for load balancers, dashboards and operators, and token conversion."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import inl
from inl.engine.records import Stats
from inl.serve.anthropic.messages import CountRequest, conversation_of
from inl.serve.api_error import ApiError
from inl.serve.dialect import parse
from inl.serve.event_stream import encode
from inl.serve.gate import read_body
from inl.serve.job import Conversation
from inl.serve.metrics import kv_usage
from inl.serve.openai.fields import TokenId
from inl.serve.openai.messages import (
    Message,
    ToolSchema,
    template_messages,
    tools_of,
)

if TYPE_CHECKING:
    from inl.serve.metrics import Metrics
    from inl.serve.model_slot import ModelSlot
    from inl.serve.models import Models
    from inl.serve.served_model import ServedModel


SUMMED = ("server_load", "running", "waiting", "queued_tokens", "rejected")
"""Values of ``/load`` that are of all models; the others are the default model's."""

NO_STEPS = Stats(0, 0, 0, 0, 0)


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/tokenize``: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolSchema] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/detokenize``."""

    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]
    model: str | None = None


class Operations:
    """Endpoints that generate nothing."""

    def __init__(self, models: Models, metrics: Metrics) -> None:
        self._models = models
        self._metrics = metrics

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        get, post = partial(Route, methods=["GET"]), partial(Route, methods=["POST"])
        return [
            get("/health", self.health),
            get("/ready", self.ready),
            get("/version", self.version),
            get("/load", self.load),
            get("/metrics", self.metrics),
            get("/v1/models", self.models),
            get("/v1/models/{name:path}", self.model),
            post("/tokenize", self.tokenize),
            post("/detokenize", self.detokenize),
            post("/v1/messages/count_tokens", self.count_tokens),
            post("/v1/embeddings", self.embeddings),
        ]

    async def health(self, _: Request) -> Response:
        """Return 200 while the process runs."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Return 200 if new requests are accepted, 503 if not."""
        if self._models.is_draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ready"})

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

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        fields = parse(await read_body(request.receive), TokenizeRequest)
        async with self._models.find(fields.model).lease() as model:
            ids = await asyncio.to_thread(_tokenize, model, fields)
            body: dict[str, Any] = {
                "tokens": ids,
                "count": len(ids),
                "max_model_len": model.engine.context,
            }
            if fields.return_token_strs:
                texts = map(model.token_bytes, ids)
                body["token_strs"] = [text.decode("utf-8", "replace") for text in texts]
        return json_response(body)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        fields = parse(await read_body(request.receive), DetokenizeRequest)
        async with self._models.find(fields.model).lease() as model:
            tokenizer = model.engine.tokenizer
            text = await asyncio.to_thread(tokenizer.decode, fields.tokens, False)
        return json_response({"prompt": text})

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation."""
        fields = parse(await read_body(request.receive), CountRequest)
        slot, conversation = self._models.find(fields.model), conversation_of(fields)
        async with slot.lease() as model:
            ids = await asyncio.to_thread(model.encode, conversation)
        return json_response({"input_tokens": len(ids)})

    async def embeddings(self, _: Request) -> Response:
        """Refuse: the models generate text."""
        names = ", ".join(model.name for model in self._models)
        raise ApiError(
            400,
            f"embeddings: {names} generates text and has no pooled hidden state; serve "
            "an embedding model elsewhere",
            param="model",
            code="unsupported_model",
        )


def _tokenize(model: ServedModel, fields: TokenizeRequest) -> list[int]:
    if (fields.prompt is None) == (fields.messages is None):
        raise ApiError(400, "prompt: accepts either prompt or messages", param="prompt")
    if fields.messages is None:
        return model.engine.tokenizer.encode(
            fields.prompt or "", add_special=fields.add_special_tokens
        )
    variables: dict[str, Any] = {}
    if not fields.add_generation_prompt:
        variables["add_generation_prompt"] = False
    messages = template_messages(fields.messages)
    return model.encode(
        Conversation(messages, tools_of(fields.tools), variables=variables)
    )


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
        "is_loaded": engine is not None,
        **parent,
    }


def _load_of(slot: ModelSlot) -> dict[str, Any]:
    """Return what a model does now."""
    engine, admission = slot.engine, slot.admission
    stats = NO_STEPS if engine is None else engine.stats
    running = 0 if engine is None else len(engine.core.scheduler.running)
    return {
        "server_load": admission.open,
        "running": running,
        "waiting": max(admission.open - running, 0),
        "queued_tokens": admission.queued_tokens,
        "rejected": admission.rejected,
        "drain_rate": admission.drain_rate,
        "kv_cache_usage": 0.0 if engine is None else kv_usage(engine),
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
