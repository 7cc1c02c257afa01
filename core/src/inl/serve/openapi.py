"""The description of the endpoints that ``/openapi.json`` returns."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

import inl
from inl.serve import admin
from inl.serve.anthropic.messages import CountRequest, MessagesRequest
from inl.serve.batches.endpoints import BatchRequest
from inl.serve.conversions import DetokenizeRequest, TokenizeRequest
from inl.serve.infill import InfillRequest
from inl.serve.ollama.embeddings import EmbedRequest, OllamaEmbeddingsRequest
from inl.serve.ollama.messages import GenerateRequest, OllamaChatRequest
from inl.serve.ollama.models import ModelRequest
from inl.serve.openai.chat import ChatRequest
from inl.serve.openai.completions import CompletionRequest
from inl.serve.openai.embeddings import EmbeddingsRequest
from inl.serve.openai.responses import ResponsesRequest
from inl.serve.openai.scores import ClassifyRequest, RerankRequest, ScoreRequest

BODIES: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a conversation."),
    "/v1/completions": (CompletionRequest, "Continue texts."),
    "/v1/responses": (ResponsesRequest, "Answer an input, or continue a response."),
    "/v1/messages": (MessagesRequest, "Answer a conversation."),
    "/v1/messages/count_tokens": (CountRequest, "Count the tokens of a conversation."),
    "/v1/embeddings": (EmbeddingsRequest, "Return the embedding of each text."),
    "/infill": (InfillRequest, "Fill a gap in a text."),
    "/v1/rerank": (RerankRequest, "Order documents by their scores for a query."),
    "/v2/rerank": (RerankRequest, "The same as /v1/rerank, for Cohere's client."),
    "/rerank": (RerankRequest, "The same as /v1/rerank."),
    "/score": (ScoreRequest, "The same as /v1/score."),
    "/classify": (ClassifyRequest, "The same as /v1/classify."),
    "/v1/score": (ScoreRequest, "Return the score of each pair of texts."),
    "/v1/classify": (ClassifyRequest, "Return the class of each text."),
    "/api/chat": (OllamaChatRequest, "Answer a conversation."),
    "/api/generate": (GenerateRequest, "Answer a prompt."),
    "/api/embed": (EmbedRequest, "Return the embedding of each text."),
    "/api/embeddings": (OllamaEmbeddingsRequest, "Return the embedding of one text."),
    "/api/show": (ModelRequest, "Describe one model."),
    "/tokenize": (TokenizeRequest, "Convert a text or a conversation to token ids."),
    "/detokenize": (DetokenizeRequest, "Convert token ids to text."),
}

GETS = {
    "/v1/models": "List the models.",
    "/api/tags": "List the models.",
    "/api/ps": "List the models that are loaded.",
    "/api/version": "Return the version of Ollama's API.",
    "/health": "Return 200 while the process runs.",
    "/ready": "Return 200 if the next request would be answered.",
    "/version": "Return the version.",
    "/tokenizer_info": "Return special tokens and chat template of a model.",
    "/load": "Return open requests and the use of the cache.",
    "/metrics": "Return Prometheus metrics.",
}

FILE_GETS = {
    "/v1/files": "List the files.",
    "/v1/files/{name}": "Describe one file.",
    "/v1/files/{name}/content": "Return the content of a file.",
    "/v1/batches": "List the batches.",
    "/v1/batches/{name}": "Describe one batch.",
}

ERRORS = {
    "400": "The request is not accepted; the error names the field.",
    "401": "No accepted key was sent.",
    "413": "The body is too large.",
    "429": "Too many open requests of this key; Retry-After has the seconds to wait.",
    "503": "Too much waits, or the server stops; Retry-After has the seconds to wait.",
}


@cache
def openapi(*, has_admin: bool = False, has_files: bool = False) -> dict[str, Any]:
    """Return the OpenAPI description of all endpoints.

    has_admin: whether there are admin endpoints. has_files: whether there are files and
    batches.
    """
    bodies = {**BODIES, **(admin.BODIES if has_admin else {})}
    if has_files:
        bodies["/v1/batches"] = (BatchRequest, "Answer a file of requests.")
    types = [kind for kind, _ in bodies.values()]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    errors = {status: {"description": text} for status, text in ERRORS.items()}
    paths: dict[str, Any] = {}
    for (path, (_, text)), schema in zip(bodies.items(), schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": "The answer."}, **errors},
            }
        }
    for path, text in (GETS | (FILE_GETS if has_files else {})).items():
        answer = {"200": {"description": text}}
        described = {"get": {"summary": text, "responses": answer}}
        paths[path] = paths.get(path, {}) | described
    if has_admin:
        paths |= {path: _admin_path(path, errors) for path in admin.PARAMETERS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "inl serve", "version": inl.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _admin_path(path: str, errors: dict[str, Any]) -> dict[str, Any]:
    """Describe an admin endpoint without a body."""
    parameters = []
    for name, values in admin.PARAMETERS[path].items():
        schema = {"type": "string"} | ({} if values is None else {"enum": [*values]})
        parameters.append({"name": name, "in": "query", "schema": schema})
    method = "get" if path in admin.GETS else "post"
    text = admin.TEXTS[path]
    responses = {"200": {"description": text}, **errors}
    return {method: {"summary": text, "parameters": parameters, "responses": responses}}
