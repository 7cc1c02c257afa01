"""The server's application: endpoints behind the gate."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from inl.errors import InlError
from inl.serve.admin import Admin
from inl.serve.anthropic.exchange import MessagesExchange
from inl.serve.api_error import ApiError, as_api_error
from inl.serve.batches.endpoints import Batches, no_batches
from inl.serve.conversions import Conversions
from inl.serve.event_stream import encode
from inl.serve.gate import Gate
from inl.serve.generate_endpoint import Catalog, GenerateEndpoint
from inl.serve.infill import InfillExchange
from inl.serve.ollama.embeddings import OllamaEmbeddings
from inl.serve.ollama.exchange import OllamaChatExchange, OllamaGenerateExchange
from inl.serve.ollama.models import OllamaModels
from inl.serve.ollama.store import OllamaStore
from inl.serve.openai.chat import ChatExchange
from inl.serve.openai.completions import CompletionExchange
from inl.serve.openai.embeddings import Embeddings
from inl.serve.openai.responses_endpoint import (
    RESPONSES,
    ResponsesEndpoint,
    stored_routes,
)
from inl.serve.openai.responses_exchange import ResponsesExchange
from inl.serve.openai.scores import Scores
from inl.serve.openapi import openapi
from inl.serve.operations import Operations, json_response
from inl.serve.web_page import page_routes

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from inl.serve.batches.batch_queue import BatchQueue
    from inl.serve.dialect import MakeExchange
    from inl.serve.metrics import Metrics
    from inl.serve.models import Models
    from inl.serve.openai.response_store import ResponseStore, StoresResponses
    from inl.serve.settings import ServerConfig
    from inl.serve.tracing import Tracing

log = logging.getLogger("inl.serve")


GENERATING: dict[str, MakeExchange] = {
    "/v1/chat/completions": ChatExchange,
    "/v1/completions": CompletionExchange,
    RESPONSES: ResponsesExchange,
    "/v1/messages": MessagesExchange,
    "/infill": InfillExchange,
    "/api/chat": OllamaChatExchange,
    "/api/generate": OllamaGenerateExchange,
}


def error_shape(path: str, error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the dialect of a path."""
    if path.startswith("/v1/messages"):
        return error.anthropic()
    if path.startswith("/api/"):
        return error.ollama()
    return error.openai()


def make_app(
    endpoints: Starlette,
    models: Models,
    config: ServerConfig,
    tracing: Tracing | None = None,
) -> Gate:
    """Return the ASGI application of a server: its endpoints behind the gate."""

    async def check_room(path: str, client: str) -> None:
        if path in GENERATING:
            models.check_room(client)

    # Others refuse a request before its body by bounds of their own.
    return Gate(endpoints, config, error_shape, check_room, tracing, GENERATING)


def make_endpoints(
    models: Models,
    metrics: Metrics,
    config: ServerConfig,
    batches: BatchQueue | None = None,
    responses: ResponseStore | None = None,
) -> Starlette:
    """Return all endpoints, without the gate.

    batches: those of the server's folder of files, if it has one. responses: stored
    ones, if there are any.
    """
    # First those whose requests are counted in thousands: they are tried in turn.
    routes: list[BaseRoute] = [
        Route(
            path,
            generate_endpoint(path, make, models, config, responses),
            methods=["POST"],
        )
        for path, make in GENERATING.items()
    ]
    routes += Operations(models, metrics).routes()
    routes += Conversions(models, config).routes()
    embeddings = Embeddings(models, config)
    routes += embeddings.routes()
    routes += Scores(embeddings).routes()
    routes += OllamaEmbeddings(embeddings).routes()
    if batches is None:
        routes += no_batches()
    else:
        routes += Batches(batches, models, config).routes()
    routes += OllamaModels(models, config.idle_unload).routes()
    routes += OllamaStore(models, is_allowed=bool(config.admin_keys)).routes()
    if config.admin_keys:
        routes += Admin(models).routes()
    if responses is not None:
        routes += stored_routes(responses)
    description = openapi(
        has_admin=bool(config.admin_keys), has_files=batches is not None
    )
    describe = partial(_describe, description)
    routes.append(Route("/openapi.json", describe, methods=["GET"]))
    routes += page_routes()
    return Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)


def generate_endpoint(
    path: str,
    make: MakeExchange,
    models: Catalog,
    config: ServerConfig,
    responses: StoresResponses | None,
) -> GenerateEndpoint:
    """Return the endpoint of a dialect's path."""
    errors = partial(error_shape, path)
    if path == RESPONSES:
        return ResponsesEndpoint(errors, models, config, responses)
    return GenerateEndpoint(make, errors, models, config)


async def _describe(description: dict[str, Any], _: Request) -> Response:
    return json_response(description)


async def _on_error(request: Request, error: Exception) -> Response:
    failure = as_api_error(error)
    if failure.status == 500:
        log.error("%s failed", request.scope["path"], exc_info=error)
    body = error_shape(request.scope["path"], failure)
    return Response(
        encode(body), failure.status, failure.headers, media_type="application/json"
    )


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    path = request.scope["path"]
    text = f"{request.method} {path:.200}: {error.detail.lower()}; see /openapi.json"
    response = await _on_error(request, ApiError(error.status_code, text))
    response.headers.update(error.headers or {})
    return response


ERROR_HANDLERS: dict[Any, Any] = {
    ApiError: _on_error,
    InlError: _on_error,
    HTTPException: _on_http_error,
    Exception: _on_error,
}
