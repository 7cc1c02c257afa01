"""A field that is null is absent, in each dialect."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from encoder_servers import EncoderServer
from http_servers import HashServer
from inl.serve.absent_fields import without_absent
from inl.serve.anthropic.messages import CountRequest as MessageCount
from inl.serve.anthropic.messages import MessagesRequest
from inl.serve.infill import InfillRequest
from inl.serve.ollama.messages import GenerateRequest, OllamaChatRequest
from inl.serve.openai.chat import ChatRequest
from inl.serve.openai.completions import CompletionRequest
from inl.serve.openai.embeddings import EmbeddingsRequest
from inl.serve.openai.responses import ResponsesRequest
from inl.serve.openai.scores import ClassifyRequest, RerankRequest, ScoreRequest

TURNS = [{"role": "user", "content": "a"}]
GENERATING = {
    "/v1/chat/completions": (ChatRequest, {"messages": TURNS, "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 2}),
    "/v1/messages": (MessagesRequest, {"messages": TURNS, "max_tokens": 2}),
    "/v1/messages/count_tokens": (MessageCount, {"messages": TURNS}),
}
TEXTS = {
    "/v1/embeddings": (EmbeddingsRequest, {"input": "w1"}),
    "/v1/rerank": (RerankRequest, {"query": "w1", "documents": ["w2", {"text": "w3"}]}),
    "/v1/score": (ScoreRequest, {"text_1": "w1", "text_2": "w2"}),
    "/v1/classify": (ClassifyRequest, {"input": "w1"}),
}
CHANGING = re.compile(r'"(id|created|created_at|completed_at)":("[^"]*"|\d+)')
"""Members of an answer that no two have the same."""


@pytest.fixture(scope="module")
def generating():
    with HashServer() as server:
        path, (_, body) = next(iter(GENERATING.items()))
        answer_of(server, path, body)
        # Else answers are drawn.
        server.engine.sampling_defaults = {"temperature": 0}
        yield server


@pytest.fixture(scope="module")
def crossing():
    with EncoderServer(labels=1) as server:
        yield server


@pytest.fixture(scope="module")
def embedding():
    with EncoderServer() as server:
        yield server


def optional_fields(schema):
    """Fields of a request that it may lack."""
    return [
        field.encode_name
        for field in msgspec.structs.fields(schema)
        if not field.required
    ]


def structs(schema):
    """The types of objects within a request."""
    kinds, seen = [msgspec.inspect.type_info(schema)], {}
    while kinds:
        kind = kinds.pop()
        if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in seen:
            seen[kind.cls] = kind.fields
            kinds += [field.type for field in kind.fields]
        for name in ("type", "item_type", "types"):
            inner = getattr(kind, name, ())
            kinds += inner if isinstance(inner, tuple) else [inner]
    return seen


def answer_of(server, path, body):
    status, _, answer = server.send("POST", path, body)
    assert status == 200, (body, answer)
    return CHANGING.sub(r'"\1":0', json.dumps(answer, separators=(",", ":")))


def check_all(server, path, schema, body):
    """Neither a field alone changes anything, nor all of them, nor an unknown one."""
    names = optional_fields(schema)
    # A second one finds the prefix of its prompt in the cache.
    answer_of(server, path, body)
    expected = answer_of(server, path, body)
    for given in [*([name] for name in names if name not in body), names]:
        absent = {name: None for name in given if name not in body}
        assert answer_of(server, path, {**body, **absent}) == expected, given
    unknown = {"a_field_that_nobody_knows": None}
    assert answer_of(server, path, {**body, **unknown}) == expected


@pytest.mark.parametrize("path", GENERATING)
def test_null_is_the_default_of_each_field(generating, path):
    check_all(generating, path, *GENERATING[path])


@pytest.mark.parametrize("path", TEXTS)
def test_null_is_the_default_of_encoders(embedding, crossing, path):
    server = embedding if path == "/v1/embeddings" else crossing
    check_all(server, path, *TEXTS[path])


ALL = [*(each for each, _ in (GENERATING | TEXTS).values()), InfillRequest,
       OllamaChatRequest, GenerateRequest]  # fmt: skip


@pytest.mark.parametrize("schema", ALL)
def test_null_is_accepted_within_objects(schema):
    """Every optional member of every object of a request, at its own place."""
    for cls, fields in structs(schema).items():
        lacking = {field.encode_name: None for field in fields if not field.required}
        holder = msgspec.defstruct("Holder", [("inner", cls | None, None)])
        found = without_absent({"inner": lacking}, holder, {})
        assert found == {"inner": {}}
