"""``/v1/rerank``, ``/v1/score`` and ``/v1/classify``, shaped as by Jina and vLLM.

Cohere's client sends to ``/v2/rerank``; vLLM has the paths without a version too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inl.serve.api_error import ApiError
from inl.serve.dialect import parse
from inl.serve.openai.embeddings import (
    MOST_TEXTS,
    Embeddings,
    EmbeddingsForm,
    Ids,
    Items,
    encode_texts,
    texts_of,
)

if TYPE_CHECKING:
    from inl.serve.served_model import ServedModel


class Document(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A document of ``/v1/rerank`` as an object."""

    text: str


Texts = Annotated[list[str], Meta(min_length=1, max_length=MOST_TEXTS)]
Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=MOST_TEXTS)]


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/rerank``."""

    query: str
    documents: Documents
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = True
    user: str | None = None


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/score``: one first text for all second ones, or as many."""

    text_1: str | Texts
    text_2: str | Texts
    model: str | None = None
    user: str | None = None


class ClassifyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``/v1/classify``: a text, token ids, or a list of either."""

    input: str | Items
    model: str | None = None
    user: str | None = None


class Scores:
    """The endpoints, with the bounds of ``/v1/embeddings``."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        forms: dict[str, type[EmbeddingsForm]] = {
            "/v1/rerank": _Rerank, "/v2/rerank": _Rerank, "/rerank": _Rerank,
            "/v1/score": _Score, "/score": _Score,
            "/v1/classify": _Classify, "/classify": _Classify,
        }  # fmt: skip
        return [
            Route(path, partial(self._answer, form), methods=["POST"])
            for path, form in forms.items()
        ]

    async def _answer(self, form: type[EmbeddingsForm], request: Request) -> Response:
        return await self._embeddings.answer(request, form())


def _head(kind: str, name: str, prompts: Sequence[Ids]) -> dict[str, Any]:
    """Return the fields that all responses have."""
    tokens = sum(map(len, prompts))
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


class _Rerank(EmbeddingsForm):
    """One call of ``/v1/rerank``."""

    def read(self, body: bytes) -> str | None:
        self._fields = parse(body, RerankRequest)
        self._documents = [
            each if isinstance(each, str) else each.text
            for each in self._fields.documents
        ]
        return self._fields.model

    def encode(self, model: ServedModel) -> list[Ids]:
        return encode_texts(model, [self._fields.query, *self._documents])

    def compute(self, model: ServedModel, prompts: Sequence[Ids]) -> Sequence[Any]:
        del prompts  # a cross-encoder reads pairs
        fields = self._fields
        return model.engine.rank(fields.query, self._documents, top=fields.top_n)

    def body(self, rows: Sequence[Any], prompts: Sequence[Ids], name: str) -> Any:
        results = []
        for row in rows:
            index = row.index
            found: dict[str, Any] = {"index": index, "relevance_score": row.score}
            if self._fields.return_documents:
                found["document"] = {"text": self._documents[index]}
            results.append(found)
        return {**_head("rerank", name, prompts), "results": results}


class _Score(EmbeddingsForm):
    """One call of ``/v1/score``."""

    def read(self, body: bytes) -> str | None:
        fields = parse(body, ScoreRequest)
        first, second = (
            [given] if isinstance(given, str) else list(given)
            for given in (fields.text_1, fields.text_2)
        )
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise ApiError(
                400, f"text_1: found {len(first)} texts, accepts 1 or as many as "
                f"text_2, {len(second)}", param="text_1", code="invalid_value",
            )  # fmt: skip
        self._pairs = first, second
        return fields.model

    def encode(self, model: ServedModel) -> list[Ids]:
        return encode_texts(model, [*self._pairs[0], *self._pairs[1]])

    def compute(self, model: ServedModel, prompts: Sequence[Ids]) -> Sequence[Any]:
        del prompts  # a cross-encoder reads pairs
        scores: list[float] = model.engine.score(*self._pairs).tolist()
        return scores

    def body(self, rows: Sequence[Any], prompts: Sequence[Ids], name: str) -> Any:
        data = [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(rows)
        ]
        head = _head("score", name, prompts)
        return {**head, "object": "list", "created": int(time.time()), "data": data}


class _Classify(EmbeddingsForm):
    """One call of ``/v1/classify``."""

    def read(self, body: bytes) -> str | None:
        fields = parse(body, ClassifyRequest)
        self._texts = texts_of(fields.input)
        return fields.model

    def encode(self, model: ServedModel) -> list[Ids]:
        return encode_texts(model, self._texts)

    def compute(self, model: ServedModel, prompts: Sequence[Ids]) -> Sequence[Any]:
        return model.engine.classify(prompts)

    def body(self, rows: Sequence[Any], prompts: Sequence[Ids], name: str) -> Any:
        data = [
            {"index": index, "label": row.label, "probs": row.scores.tolist(),
             "num_classes": len(row.scores)}
            for index, row in enumerate(rows)
        ]  # fmt: skip
        head = _head("classify", name, prompts)
        return {**head, "object": "list", "created": int(time.time()), "data": data}
