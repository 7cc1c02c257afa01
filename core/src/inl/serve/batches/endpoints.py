"""``/v1/files`` and ``/v1/batches``, as OpenAI's."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from inl.serve.api_error import ApiError, unsupported
from inl.serve.batches.batch import Batch
from inl.serve.batches.file_store import StoredFile
from inl.serve.batches.multipart import Part, parse_form
from inl.serve.bounded_calls import BoundedCalls
from inl.serve.http_messages import parsed
from inl.serve.operations import json_response

if TYPE_CHECKING:
    from inl.serve.batches.batch_queue import BatchQueue
    from inl.serve.models import Models
    from inl.serve.settings import ServerConfig

R = TypeVar("R", StoredFile, Batch)

PAGE = 20
"""Batches of a page without ``limit``."""

MOST = 10_000
"""Items of a page, and its default for files."""

LIMIT = re.compile(r"[0-9]{1,9}")

UPLOADS = 2
"""Files that are written at the same time, and parts of them that are read."""

PART_BYTES = 256 << 10
"""Bytes of a file that are in memory for a client that reads it."""

MAX_NAME = 512
"""Characters of a file's name."""

LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 24 * 3600
"""Time after which a file may expire, as OpenAI's."""

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/batches``."""

    input_file_id: str
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
    ]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None
    ) = None


class Batches:
    """The endpoints. keys: api keys of the server, which own what they upload."""

    def __init__(self, queue: BatchQueue, models: Models, config: ServerConfig) -> None:
        self._queue = queue
        self._files = queue.files
        self._calls = BoundedCalls(models, config, name="inl-files", running=UPLOADS)
        self._owners = {
            f"key {position}": self._files.owner_of(key)
            for position, key in enumerate(config.api_keys)
        }

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        get = partial(Route, methods=["GET"])
        post = partial(Route, methods=["POST"])
        return [
            post("/v1/files", self.upload),
            get("/v1/files", self.list_files),
            get("/v1/files/{name}", self.file),
            Route("/v1/files/{name}", self.delete, methods=["DELETE"]),
            get("/v1/files/{name}/content", self.content),
            post("/v1/batches", self.create),
            get("/v1/batches", self.list_batches),
            get("/v1/batches/{name}", self.batch),
            post("/v1/batches/{name}/cancel", self.cancel),
        ]

    def _owner(self, request: Request) -> str:
        return self._owners.get(request.state.client, "")

    def _file(self, request: Request) -> StoredFile:
        return self._files.find(self._owner(request), request.path_params["name"])

    async def upload(self, request: Request) -> Response:
        """Store a file."""
        async with self._calls.admitted(request) as (_, body):
            return await self._store(request, body)

    async def _store(self, request: Request, body: bytes) -> Response:
        kind = request.headers.get("content-type", "")
        parts = await self._calls.run(partial(parse_form, kind, body))
        part = parts.get("file")
        if part is None or part.filename is None:
            raise ApiError(400, "file: found none; accepts one part", param="file")
        purpose = _text(parts, "purpose")
        if purpose != "batch":
            found = f"found {purpose!r:.60}, accepts 'batch'"
            raise ApiError(400, f"purpose: {found}", param="purpose")
        name = part.filename[:MAX_NAME]
        seconds = _expiry(parts)
        file = self._files.add(
            self._owner(request), name, purpose, len(part.data), seconds
        )
        try:
            await self._calls.run(partial(self._files.write, file.id, part.data))
            self._files.finish(file)
        except BaseException:
            self._files.delete(file)
            raise
        return json_response(_file_body(file))

    async def list_files(self, request: Request) -> Response:
        """List the files of the key."""
        files = self._files.of(self._owner(request))
        purpose = request.query_params.get("purpose")

        def page() -> Response:
            kept = [each for each in files if purpose in (None, each.purpose)]
            return json_response(_page(request, kept, MOST, _file_body))

        return await self._calls.run(page)

    async def file(self, request: Request) -> Response:
        """Return one file's description."""
        return json_response(_file_body(self._file(request)))

    async def content(self, request: Request) -> Response:
        """Return the content of a file."""
        file = self._file(request)
        try:
            content = await self._calls.run(partial(self._files.open, file.id))
        except FileNotFoundError:
            self._file(request)  # it has been deleted meanwhile
            raise
        return StreamingResponse(
            self._parts(content, file.bytes),
            media_type="application/octet-stream",
            headers={"content-length": str(file.bytes)},
        )

    async def _parts(self, content: BinaryIO, size: int) -> AsyncIterator[bytes]:
        """Yield a file in parts, each once the client has taken those before."""
        with content:
            for _ in range(0, size, PART_BYTES):
                yield await self._calls.run(partial(content.read, PART_BYTES))

    async def delete(self, request: Request) -> Response:
        """Delete a file that no open batch needs."""
        file = self._file(request)
        if self._queue.uses(file):
            raise ApiError(
                409, f"file: found {file.id} in a batch that has not ended; cancel it",
                param="file_id", code="file_in_use",
            )  # fmt: skip
        self._files.delete(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def create(self, request: Request) -> Response:
        """Queue a batch."""
        fields = await parsed(request, BatchRequest)
        file = self._files.find(self._owner(request), fields.input_file_id)
        if file.purpose != "batch":
            raise unsupported("input_file_id", f"found purpose {file.purpose!r}")
        batch = self._queue.add(file, fields.endpoint, fields.metadata)
        return json_response(batch.body())

    async def list_batches(self, request: Request) -> Response:
        """List the batches of the key."""
        batches = self._queue.of(self._owner(request))
        page = partial(_page, request, batches, PAGE, Batch.body)
        return await self._calls.run(lambda: json_response(page()))

    async def batch(self, request: Request) -> Response:
        """Return one batch."""
        name = request.path_params["name"]
        return json_response(self._queue.find(self._owner(request), name).body())

    async def cancel(self, request: Request) -> Response:
        """Answer no more requests of a batch."""
        name = request.path_params["name"]
        batch = self._queue.find(self._owner(request), name)
        self._queue.cancel(batch)
        return json_response(batch.body())


def no_batches() -> list[Route]:
    """Return routes that say how a server stores files."""

    async def refuse(_: Request) -> Response:
        raise ApiError(
            404, "files and batches: this server stores none; start it with --files "
            "FOLDER", code="no_files",
        )  # fmt: skip

    methods = ["GET", "POST", "DELETE"]
    return [
        Route(f"/v1/{kind}{rest}", refuse, methods=methods)
        for kind in ("files", "batches")
        for rest in ("", "/{rest:path}")
    ]


def _file_body(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _page(
    request: Request,
    items: Sequence[R],
    default: int,
    body: Callable[[R], dict[str, Any]],
) -> dict[str, Any]:
    """Return the part of a list that ``after``, ``limit`` and ``order`` name."""
    query = request.query_params
    limit = query.get("limit") or str(default)
    if not LIMIT.fullmatch(limit) or not 1 <= int(limit) <= MOST:
        raise ApiError(
            400, f"limit: found {limit!r:.20}, accepts 1 to {MOST}", param="limit"
        )
    if query.get("order") == "asc":
        items = items[::-1]
    start = 0
    if (after := query.get("after")) is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise ApiError(400, f"after: found no {after!r:.60}", param="after")
        start = ids.index(after) + 1
    shown = [body(each) for each in items[start : start + int(limit)]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > start + len(shown),
    }


def _text(parts: dict[str, Part], name: str) -> str | None:
    part = parts.get(name)
    return None if part is None else part.data.decode("utf-8", "replace")


def _expiry(parts: dict[str, Part]) -> int | None:
    """Return the seconds after which a file expires; ``None`` keeps it."""
    anchor = _text(parts, "expires_after[anchor]")
    seconds = _text(parts, "expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    valid = seconds is not None and seconds.isdecimal() and len(seconds) < 10
    value = int(seconds) if valid and seconds is not None else 0
    if anchor != "created_at" or not LEAST_SECONDS <= value <= MOST_SECONDS:
        raise ApiError(
            400,
            f"expires_after: found {seconds!r:.20} after {anchor!r:.20}, accepts "
            f"{LEAST_SECONDS} to {MOST_SECONDS} seconds after 'created_at'",
            param="expires_after",
        )
    return value
