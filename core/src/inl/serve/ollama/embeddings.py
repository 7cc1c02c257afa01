"""``/api/embed`` and ``/api/embeddings``: vectors of texts, in Ollama's form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inl.serve.dialect import parse
from inl.serve.ollama.exchange import nanoseconds
from inl.serve.ollama.fields import KeepAlive, Options, served_name
from inl.serve.openai.embeddings import (
    Embeddings,
    EmbeddingsForm,
    Ids,
    check_count,
    encode_texts,
)

if TYPE_CHECKING:
    from inl.serve.served_model import ServedModel


class EmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/api/embed``; truncate: whether too long a text is cut, not refused."""

    input: str | list[str]
    model: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/api/embeddings``, the older endpoint of one text."""

    prompt: str
    model: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddings:
    """Both endpoints, with the bounds of ``/v1/embeddings``."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def routes(self) -> list[Route]:
        """Return the routes of both endpoints."""
        return [
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/embeddings", self.embeddings, methods=["POST"]),
        ]

    async def embed(self, request: Request) -> Response:
        """Return the embedding of each text; raises :class:`ApiError`."""
        return await self._embeddings.answer(request, _Embed())

    async def embeddings(self, request: Request) -> Response:
        """Return the embedding of one text; raises :class:`ApiError`."""
        return await self._embeddings.answer(request, _OneText())


class _Embed(EmbeddingsForm):
    """One call of ``/api/embed``."""

    def __init__(self) -> None:
        self._received = self._loaded = time.perf_counter()
        self._request = EmbedRequest(input="")

    def read(self, body: bytes) -> str | None:
        self._request = request = parse(body, EmbedRequest)
        check_count(request.input)
        self.dimensions = request.dimensions
        return served_name(request.model)

    def encode(self, model: ServedModel) -> list[Ids]:
        self._loaded = time.perf_counter()
        given = self._request.input
        texts = [given] if isinstance(given, str) else given
        if self._request.truncate is False:
            return encode_texts(model, texts)
        tokenizer, context = model.engine.tokenizer, model.engine.context
        ids = [tokenizer.encode(text)[:context] for text in texts]
        return encode_texts(model, ids)

    def body(self, rows: Sequence[Any], prompts: Sequence[Ids], name: str) -> Any:
        return {
            "model": self._request.model or name,
            "embeddings": [row.tolist() for row in rows],
            "total_duration": nanoseconds(time.perf_counter() - self._received),
            "load_duration": nanoseconds(self._loaded - self._received),
            "prompt_eval_count": sum(map(len, prompts)),
        }


class _OneText(EmbeddingsForm):
    """One call of ``/api/embeddings``."""

    _prompt = ""

    def read(self, body: bytes) -> str | None:
        request = parse(body, OllamaEmbeddingsRequest)
        self._prompt = request.prompt
        return served_name(request.model)

    def encode(self, model: ServedModel) -> list[Ids]:
        return encode_texts(model, [self._prompt])

    def body(self, rows: Sequence[Any], prompts: Sequence[Ids], name: str) -> Any:
        del prompts, name
        return {"embedding": rows[0].tolist()}
