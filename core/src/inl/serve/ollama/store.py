"""``/api/pull`` and ``/api/delete``: models on the server's disk, by operators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from inl.engine.stored_models import pull_model, remove_model
from inl.errors import CheckpointError
from inl.serve.api_error import ApiError, as_api_error
from inl.serve.dialect import parse
from inl.serve.ollama.exchange import MEDIA_TYPE, line
from inl.serve.ollama.models import ModelRequest, model_name
from inl.serve.operations import json_response

if TYPE_CHECKING:
    from inl.serve.models import Models

log = logging.getLogger("inl.serve")


class PullRequest(ModelRequest, kw_only=True):
    """Body of ``/api/pull``."""

    stream: bool | None = None


class OllamaStore:
    """Both endpoints. is_allowed: whether the server has admin keys."""

    def __init__(self, models: Models, *, is_allowed: bool) -> None:
        self._models = models
        self._is_allowed = is_allowed
        self._pulling = asyncio.Lock()
        # A download goes on if its client leaves, and the next one waits for it.
        self._threads = ThreadPoolExecutor(1, "inl-pull")

    def routes(self) -> list[Route]:
        """Return the routes of both endpoints."""
        return [
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/delete", self.delete, methods=["DELETE"]),
        ]

    def _check(self, what: str) -> None:
        if not self._is_allowed:
            raise ApiError(
                403,
                f"{what}: this server has no admin key, and changes no files; start "
                f"it with --admin-key and send that key, or use `inl {what}`",
                code="not_allowed",
            )

    def _serves(self, name: str) -> bool:
        return any(name in (slot.name, *slot.adapters) for slot in self._models)

    async def pull(self, request: Request) -> Response:
        """Download a model, one at a time; a served model is there already."""
        fields = parse(await request.body(), PullRequest)
        name = model_name(fields)
        statuses = self._served() if self._serves(name) else self._pull(name)
        if fields.stream is not False:
            first = await anext(statuses)  # an error before it has its own status
            return StreamingResponse(
                _lines(first, statuses), media_type=MEDIA_TYPE.decode()
            )
        async for status in statuses:
            last = status
        return json_response(last)

    async def _served(self) -> AsyncIterator[dict[str, Any]]:
        yield {"status": "success"}

    async def _pull(self, name: str) -> AsyncIterator[dict[str, Any]]:
        self._check("pull")
        yield {"status": "pulling manifest"}
        news: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def report(arrived: int, total: int | None) -> None:
            status = {"status": f"pulling {name}", "digest": name, "completed": arrived}
            if total is not None:
                status["total"] = total
            loop.call_soon_threadsafe(news.put_nowait, status)

        async with self._pulling:
            work = partial(pull_model, name, report)
            download = loop.run_in_executor(self._threads, work)
            download.add_done_callback(lambda _: news.put_nowait(None))
            while (status := await news.get()) is not None:
                yield status
            path = await download
        log.info("model %s stored in %s", name, path)
        yield {"status": f"stored; serve it with: inl serve {name}"}
        yield {"status": "success"}

    async def delete(self, request: Request) -> Response:
        """Remove a model that is not served from the cache."""
        self._check("rm")
        name = model_name(parse(await request.body(), ModelRequest))
        if self._serves(name):
            raise ApiError(409, f"model: {name!r:.80} is served; stop its server first")
        try:
            freed = await asyncio.to_thread(remove_model, name)
        except CheckpointError as error:
            raise ApiError(404, str(error), param="model") from error
        log.info("model %s removed, %d bytes freed", name, freed)
        return Response()


async def _lines(
    first: dict[str, Any], statuses: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[bytes]:
    yield line(first)
    try:
        async for status in statuses:
            yield line(status)
    except Exception as error:  # the status has been sent
        failure = as_api_error(error)
        log.warning("pull failed: %s", failure.message)
        yield line(failure.ollama())
