"""``/v1/responses`` and its stored responses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inl.serve.api_error import ApiError, unsupported
from inl.serve.generate_endpoint import GenerateEndpoint
from inl.serve.http_messages import decoded
from inl.serve.openai.responses_exchange import ResponsesExchange, response_of
from inl.serve.operations import json_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from inl.serve.dialect import Exchange
    from inl.serve.generate_endpoint import Catalog
    from inl.serve.generations import Generations
    from inl.serve.openai.response_store import ResponseStore, StoresResponses
    from inl.serve.settings import ServerConfig


RESPONSES = "/v1/responses"


class ResponsesEndpoint(GenerateEndpoint):
    """Answers, continues and stores responses. store: ``None`` stores none."""

    def __init__(
        self,
        error_body: Callable[[ApiError], dict[str, Any]],
        models: Catalog,
        config: ServerConfig,
        store: StoresResponses | None,
    ) -> None:
        super().__init__(ResponsesExchange, error_body, models, config)
        self._store = store

    async def begin(self, exchange: Exchange, client: str) -> None:
        """Put what an earlier response had read and written before the input."""
        assert isinstance(exchange, ResponsesExchange), "made here"
        name, store = exchange.previous_id, self._store
        exchange.is_stored &= store is not None
        if name is None:
            return
        if store is None:
            raise unsupported(
                "previous_response_id", "this server stores no responses "
                "(--stored-responses 0); send the whole input",
            )  # fmt: skip
        await decoded(await store.get(client, name), exchange.continue_from)

    def started(self, exchange: Exchange, generations: Generations) -> None:
        """Report the sampling that the answer has, which the API does as numbers."""
        assert isinstance(exchange, ResponsesExchange), "made here"
        exchange.sampling = generations.sampling or exchange.sampling

    async def end(self, exchange: Exchange, client: str) -> None:
        """Store a response, before the client can name it."""
        assert isinstance(exchange, ResponsesExchange), "made here"
        if self._store is not None and exchange.is_stored:
            await self._store.put(client, exchange.id, exchange.stored())


def stored_routes(store: ResponseStore) -> list[Route]:
    """Return the routes of stored responses."""
    path = f"{RESPONSES}/{{name}}"
    return [
        Route(f"{RESPONSES}/compact", _compact, methods=["POST"]),
        Route(path, partial(_read, store), methods=["GET"]),
        Route(path, partial(_delete, store), methods=["DELETE"]),
    ]


async def _compact(_: Request) -> Response:
    raise ApiError(404, f"{RESPONSES}/compact: is not supported; send the whole input")


async def _read(store: ResponseStore, request: Request) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream") == "true":
        raise unsupported("stream", "is not supported for a stored response")
    name = request.path_params["name"]
    data = await store.get(request.state.client, name)
    return Response(await decoded(data, response_of), media_type="application/json")


async def _delete(store: ResponseStore, request: Request) -> Response:
    """Forget a stored response."""
    name = request.path_params["name"]
    store.delete(request.state.client, name)
    return json_response({"id": name, "object": "response", "deleted": True})
