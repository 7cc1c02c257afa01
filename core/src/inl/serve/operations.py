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
    from inl.serve.admission import Admission
    from inl.serve.metrics import Metrics
    from inl.serve.served_model import Models, ServedModel


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

    def __init__(self, models: Models, admission: Admission, metrics: Metrics) -> None:
        self._models = models
        self._admission = admission
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
        if self._admission.is_draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ready"})

    async def version(self, _: Request) -> Response:
        """Return the version of the server."""
        return json_response({"version": inl.__version__})

    async def load(self, _: Request) -> Response:
        """Return what the server does now."""
        engine, admission = self._models.default.engine, self._admission
        running = len(engine.core.scheduler.running)
        stats = engine.stats
        body = {
            "server_load": admission.open,
            "running": running,
            "waiting": max(admission.open - running, 0),
            "queued_tokens": admission.queued_tokens,
            "rejected": admission.rejected,
            "drain_rate": admission.drain_rate,
            "kv_cache_usage": kv_usage(engine),
            "preemptions": stats.preemptions,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "computed_tokens": stats.tokens,
            "steps": stats.steps,
            "context": engine.context,
            "device": str(engine.device),
        }
        return json_response(body)

    async def metrics(self, _: Request) -> Response:
        """Return Prometheus metrics."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._metrics.text(), media_type=kind)

    async def models(self, _: Request) -> Response:
        """List the models."""
        data = [_model_body(each) for each in self._models]
        return json_response({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """Return one model."""
        model = self._models.find(request.path_params["name"])
        return json_response(_model_body(model))

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        fields = parse(await read_body(request.receive), TokenizeRequest)
        model = self._models.find(fields.model)
        ids = await asyncio.to_thread(_tokenize, model, fields)
        body: dict[str, Any] = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": model.engine.context,
        }
        if fields.return_token_strs:
            body["token_strs"] = [model.token_bytes(each).decode("utf-8", "replace")
                                  for each in ids]  # fmt: skip
        return json_response(body)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids."""
        fields = parse(await read_body(request.receive), DetokenizeRequest)
        tokenizer = self._models.find(fields.model).engine.tokenizer
        text = await asyncio.to_thread(tokenizer.decode, fields.tokens, False)
        return json_response({"prompt": text})

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation."""
        fields = parse(await read_body(request.receive), CountRequest)
        model, conversation = self._models.find(fields.model), conversation_of(fields)
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


def _model_body(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "inl",
        "max_model_len": model.engine.context,
    }


def json_response(body: Any, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(encode(body), status, media_type="application/json")
