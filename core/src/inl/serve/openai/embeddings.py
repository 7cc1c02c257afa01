"""``/v1/embeddings``: the embedding of each text."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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

RUNNING = 8
"""Calls at the same time, whose texts the engine computes together."""

Ids = tuple[int, ...]
IdList = Annotated[list[TokenId], Meta(min_length=1)]
Items = Annotated[list[str | TokenId | IdList], Meta(min_length=1)]


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/embeddings``: a text, token ids, or a list of either."""

    input: str | Items
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None


class EmbeddingsForm(ABC):
    """One call in a dialect: its texts, what is computed of them, its response."""

    dimensions: int | None = None
    """First elements of each embedding that are returned; ``None`` is all."""

    @abstractmethod
    def read(self, body: bytes) -> str | None:
        """Parse a body; return the name of the model. Raises :class:`ApiError`."""

    @abstractmethod
    def encode(self, model: ServedModel) -> list[Ids]:
        """Return the token ids of the texts; raises the engine's errors."""

    def compute(self, model: ServedModel, prompts: Sequence[Ids]) -> Sequence[Any]:
        """Return the result of each text; raises the engine's errors."""
        return list(model.engine.embed(prompts, dimensions=self.dimensions))

    @abstractmethod
    def body(self, rows: Sequence[Any], prompts: Sequence[Ids], name: str) -> Any:
        """Return the response for the results of :meth:`compute`."""


class Embeddings:
    """The endpoint. The texts of its calls are computed in batches."""

    def __init__(self, models: Models, config: ServerConfig) -> None:
        self._models = models
        self._calls = BoundedCalls(
            models, config, name="inl-embeddings", running=RUNNING
        )

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/v1/embeddings", self.embed, methods=["POST"])]

    async def embed(self, request: Request) -> Response:
        """Return the embedding of each text; raises :class:`ApiError`."""
        return await self.answer(request, _OpenAiForm())

    async def answer(self, request: Request, form: EmbeddingsForm) -> Response:
        """Return the response of a call in any dialect; raises :class:`ApiError`."""
        async with self._calls.admitted(request) as (ticket, body):
            name = await decoded(body, form.read)
            slot = self._models.find(name)
            if name in slot.adapters:
                raise ApiError(
                    400,
                    f"model: found the adapter {name!r}; embeddings are those "
                    f"of {slot.name}",
                    param="model",
                )
            async with slot.lease() as model:
                prompts = await self._run(partial(form.encode, model))
                self._charge(ticket, prompts)
                answer = await self._run(
                    partial(_answer, model, slot.name, prompts, form)
                )
        return Response(answer, media_type="application/json")

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await self._calls.run(work)
        except Exception as error:
            raise as_api_error(error) from error

    def _charge(self, ticket: Ticket, prompts: list[Ids]) -> None:
        admission = self._calls.admission
        admission.charge(ticket, sum(map(len, prompts)))
        admission.begun(ticket)


def _answer(
    model: ServedModel, name: str, prompts: list[Ids], form: EmbeddingsForm
) -> bytes:
    return encode(form.body(form.compute(model, prompts), prompts, name))


class _OpenAiForm(EmbeddingsForm):
    """One call of ``/v1/embeddings``."""

    _form = "float"

    def read(self, body: bytes) -> str | None:
        fields = parse(body, EmbeddingsRequest)
        self._form = fields.encoding_format or "float"
        self.dimensions = fields.dimensions
        self._texts = texts_of(fields.input)
        return fields.model

    def encode(self, model: ServedModel) -> list[Ids]:
        before = model.engine.prompts.text(None)
        texts = [before + x if isinstance(x, str) else x for x in self._texts]
        return encode_texts(model, texts)

    def body(self, rows: Sequence[Any], prompts: Sequence[Ids], name: str) -> Any:
        tokens = sum(map(len, prompts))
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(row, self._form),
                }
                for index, row in enumerate(rows)
            ],
            "model": name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def texts_of(given: Any) -> list[Any]:
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
    check_count(given)
    return list(given)


def check_count(given: str | Sequence[Any]) -> None:
    """Raise :class:`ApiError` 400 for too many texts; a single one may be long."""
    if not isinstance(given, str) and len(given) > MOST_TEXTS:
        raise ApiError(
            400, f"input: found {len(given)} texts, accepts up to {MOST_TEXTS}",
            param="input", code="invalid_value",
        )  # fmt: skip


def encode_texts(model: ServedModel, texts: list[Any]) -> list[Ids]:
    """Return the token ids of texts or of lists of ids, none of which is empty."""
    prompts = [each.ids for each in model.encode_all(texts)]
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ApiError(
                400, f"input[{index}]: found no tokens, accepts 1 or more",
                param="input", code="invalid_value",
            )  # fmt: skip
    return prompts


def _encoded(row: Any, form: str) -> Any:
    if form == "float":
        return row.tolist()
    return base64.b64encode(row.astype(np.dtype("<f4")).tobytes()).decode()
