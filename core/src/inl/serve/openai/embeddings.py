"""``/v1/embeddings``: the last hidden state of each text, of length 1."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inl.serve.api_error import ApiError, as_api_error
from inl.serve.bounded_calls import BoundedCalls
from inl.serve.dialect import parse
from inl.serve.event_stream import encode
from inl.serve.http_messages import decoded
from inl.serve.openai.fields import TokenId

if TYPE_CHECKING:
    from inl.serve.admission import Ticket
    from inl.serve.models import Models
    from inl.serve.served_model import ServedModel
    from inl.serve.settings import ServerConfig

T = TypeVar("T")

MOST_TEXTS = 2048
"""Texts of a call, as OpenAI's limit."""

Ids = Annotated[list[TokenId], Meta(min_length=1)]
Items = Annotated[list[str | TokenId | Ids], Meta(min_length=1)]


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/embeddings``: a text, token ids, or a list of either."""

    input: str | Items
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    user: str | None = None


class Embeddings:
    """The endpoint. Calls run one after the other, their texts in batches."""

    def __init__(self, models: Models, config: ServerConfig) -> None:
        self._models = models
        self._calls = BoundedCalls(models, config, name="inl-embeddings", running=1)

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/v1/embeddings", self.embed, methods=["POST"])]

    async def embed(self, request: Request) -> Response:
        """Return the embedding of each text; raises :class:`ApiError`."""
        async with self._calls.admitted(request) as (ticket, body):
            fields, texts = await decoded(body, _read)
            slot = self._models.find(fields.model)
            if fields.model in slot.adapters:
                raise ApiError(
                    400,
                    f"model: found the adapter {fields.model!r}; embeddings are those "
                    f"of {slot.name}",
                    param="model",
                )
            async with slot.lease() as model:
                prompts = await self._run(partial(_encode, model, texts))
                self._charge(ticket, prompts)
                answer = await self._run(
                    partial(_body, model, slot.name, prompts, fields)
                )
        return Response(answer, media_type="application/json")

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await self._calls.run(work)
        except Exception as error:
            raise as_api_error(error) from error

    def _charge(self, ticket: Ticket, prompts: list[tuple[int, ...]]) -> None:
        admission = self._calls.admission
        admission.charge(ticket, sum(map(len, prompts)))
        admission.begun(ticket)


def _read(body: bytes) -> tuple[EmbeddingsRequest, list[Any]]:
    """Return the fields of a request, and its texts or lists of token ids."""
    fields = parse(body, EmbeddingsRequest)
    return fields, _texts(fields.input)


def _texts(given: Any) -> list[Any]:
    """Return the texts, or the lists of token ids, of the field ``input``."""
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if len(kinds) > 1:
        names = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise ApiError(
            400, f"input: found {names}; accepts a text, token ids, or lists of one",
            param="input", code="invalid_value",
        )  # fmt: skip
    if kinds == {int}:
        return [given]
    if len(given) > MOST_TEXTS:
        raise ApiError(
            400, f"input: found {len(given)} texts, accepts up to {MOST_TEXTS}",
            param="input", code="invalid_value",
        )  # fmt: skip
    return list(given)


def _encode(model: ServedModel, texts: list[Any]) -> list[tuple[int, ...]]:
    prompts = [each.ids for each in model.encode_all(texts)]
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ApiError(
                400, f"input[{index}]: found no tokens, accepts 1 or more",
                param="input", code="invalid_value",
            )  # fmt: skip
    return prompts


def _body(
    model: ServedModel,
    name: str,
    prompts: list[tuple[int, ...]],
    fields: EmbeddingsRequest,
) -> bytes:
    rows = model.engine.embed(prompts)
    return encode(
        {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(row, fields.encoding_format or "float"),
                }
                for index, row in enumerate(rows)
            ],
            "model": name,
            "usage": (
                dict.fromkeys(("prompt_tokens", "total_tokens"), sum(map(len, prompts)))
            ),
        }
    )


def _encoded(row: Any, form: str) -> Any:
    if form == "float":
        return row.tolist()
    return base64.b64encode(row.astype(np.dtype("<f4")).tobytes()).decode()
