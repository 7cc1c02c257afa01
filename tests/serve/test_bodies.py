"""Bodies of requests are bounded, and large ones are not decoded by the event loop."""

from __future__ import annotations

import gc
import threading

import pytest

from inl.garbage_collection import gc_disabled
from inl.serve import dialect, http_messages, served_model
from inl.serve.anthropic.messages import MessagesRequest
from inl.serve.api_error import ApiError
from inl.serve.dialect import parse
from inl.serve.job import Job
from inl.serve.openai.chat import ChatRequest
from inl.serve.openai.completions import CompletionRequest, prompts_of
from inl.serve.openai.responses import ResponsesRequest
from waiting import until

SAID = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1'

PATHS = {
    "/v1/chat/completions": SAID,
    "/v1/completions": b'{"prompt":[1,2],"max_tokens":1',
    "/v1/responses": b'{"input":"a","max_output_tokens":16',
    "/v1/messages": SAID,
    "/v1/messages/count_tokens": SAID.replace(b',"max_tokens":1', b""),
    "/tokenize": b'{"prompt":"a"',
    "/detokenize": b'{"tokens":[1]',
    "/v1/embeddings": b'{"input":"a"',
}
"""Paths and the beginning of a body that they accept."""

PADDING = b" " * http_messages.SMALL


def bad(begin):
    """Return names and bodies that no endpoint accepts."""
    return {
        "deep": begin + b',"metadata":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001,
        "deeper": begin + b',"metadata":' + b"[" * 100_000,
        "many values": begin + b',"metadata":{"a":[' + b"[]," * 400_000 + b"1]}}",
        "half of a pair": begin + rb',"user":"\ud800"}',
        "no UTF-8": begin + b',"user":"\xff"}',
        "NaN": begin + b',"seed":NaN}',
        "great": begin + b',"seed":' + b"9" * 5_000 + b"}",
        "cut": begin,
        "a list": b"[]",
        "long name": begin + b',"' + b"x" * 100_000 + b'":1}',
        "name like a place": begin + b',"' + b" - at `$.x" * 50_000 + b'":1}',
    }


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["small", "large"])
@pytest.mark.parametrize("path", PATHS)
def test_bad_bodies_are_answered_with_a_short_error(any_hash_server, path, padding):
    for name, body in bad(PATHS[path]).items():
        status, _, answer = any_hash_server.send("POST", path, padding + body)
        assert (status, len(str(answer)) < 700) == (400, True), (name, status, answer)
        assert "error" in answer, name


@pytest.mark.parametrize("path", PATHS)
def test_a_large_body_and_one_with_a_mark_are_answered_as_a_small_one(
    any_hash_server, path
):
    body = PATHS[path] + b"}"
    wanted = any_hash_server.send("POST", path, body)[0]
    for each in (
        b"\xef\xbb\xbf" + body,
        PADDING + body,
        b"\xef\xbb\xbf" + PADDING + body,
    ):
        assert any_hash_server.send("POST", path, each)[0] == wanted
    assert wanted in (200, 400)


@pytest.mark.parametrize("path", PATHS)
def test_large_bodies_have_threads_of_their_own(hash_server, path, monkeypatch):
    names = []
    check = dialect.check_json

    def checked(*args, **limits):
        names.append(threading.current_thread().name)
        check(*args, **limits)

    monkeypatch.setattr(dialect, "check_json", checked)
    for padding in (b"", PADDING):
        hash_server.send("POST", path, padding + PATHS[path] + b"}")
    small, large = names
    assert "inl-bodies" in large
    assert "inl-bodies" not in small


NUMBERS = [
    "seed",
    "max_tokens",
    "n",
    "top_k",
    "logprobs",
    "min_tokens",
    "priority",
    "temperature",
    "top_p",
    "prompt_logprobs",
    "prompt_logprobs_start",
    "presence_penalty",
    "truncation",
]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_numbers_of_any_size_are_no_failure(hash_server, path, name):
    begin = PATHS[path]
    for value in (2**31, 2**63, 2**64, 10**30, 10**290, 1e308):
        for number in (value, -value):
            body = begin + f',"{name}":{number}}}'.encode()
            status, _, answer = hash_server.send("POST", path, body)
            assert status in (200, 400), (number, answer)


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, 10**30, 10**290])
def test_token_ids_of_any_size_are_no_failure(hash_server, value):
    for number in (value, -value):
        for path, body in {
            "/v1/completions": {"prompt": [number], "max_tokens": 1},
            "/detokenize": {"tokens": [number]},
            "/v1/embeddings": {"input": [number]},
        }.items():
            assert hash_server.send("POST", path, body)[0] == 400
        for name in ("stop_token_ids", "allowed_token_ids"):
            body = {"prompt": [1, 2], "max_tokens": 1, name: [number]}
            assert hash_server.send("POST", "/v1/completions", body)[0] == 400
        body = {"prompt": [1, 2], "max_tokens": 1, "logit_bias": {str(number): 1}}
        assert hash_server.send("POST", "/v1/completions", body)[0] == 400


def test_many_token_ids_are_checked_by_a_thread(hash_server, monkeypatch):
    monkeypatch.setattr(served_model, "SHORT", 3)
    start, threads = hash_server.engine.start, []

    def started(*args, **options):
        threads.append(threading.current_thread().name)
        return start(*args, **options)

    monkeypatch.setattr(hash_server.engine, "start", started)
    ids = [1, 2, 3]
    for fields in ({}, {"prompt": [*ids, 4]}, {"stop_token_ids": [*ids, 4]}):
        body = {"prompt": ids, "max_tokens": 1, **fields}
        assert hash_server.send("POST", "/v1/completions", body)[0] == 200
    assert ["inl-grammars" in name for name in threads] == [False, True, True]


SCHEMAS = [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_unknown_field_is_named_in_part(schema):
    begin = next(b for b in PATHS.values() if not _refuses(b + b"}", schema))
    with pytest.raises(ApiError) as caught:
        parse(begin + b',"' + b"y" * 10_000 + b'":1}', schema)
    error = caught.value
    assert (error.code, error.param) == ("unsupported_parameter", "y" * dialect.SHOWN)
    assert len(error.message) < 200


def _refuses(body, schema):
    try:
        parse(body, schema)
    except ApiError:
        return True
    return False


def test_of_equal_fields_the_last_one_counts():
    body = b'{"prompt":"a","prompt":"b","max_tokens":1,"max_tokens":2}'
    found = parse(body, CompletionRequest)
    assert (found.prompt, found.max_tokens) == ("b", 2)


def test_a_field_is_named_by_its_place():
    with pytest.raises(ApiError) as caught:
        parse(b'{"messages":[{"role":"user","content":3}]}', ChatRequest)
    assert caught.value.param == "messages"
    assert caught.value.message.startswith("messages[0].content: expected")


def test_a_prompt_may_have_half_a_million_ids_and_2048_prompts_are_the_most():
    ids = b"1," * ((1 << 19) - 1) + b"1"
    found = parse(b'{"max_tokens":1,"prompt":[' + ids + b"]}", CompletionRequest)
    (prompt,) = prompts_of(found.prompt)
    assert prompt == [1] * (1 << 19)
    assert len(prompts_of([[1]] * 2048)) == 2048
    for many in ([[1]] * 2049, ["a"] * 2049):
        with pytest.raises(ApiError, match="prompt: found 2049 prompts"):
            prompts_of(many)


def test_brackets_and_commas_in_texts_do_not_count():
    text = b"[{,:" * 1_000_000
    found = parse(SAID.replace(b'"a"', b'"' + text + b'"') + b"}", ChatRequest)
    assert len(found.messages[0].content) == 4_000_000


FAILING = {
    "an option": {"stop": ["a"] * 100},
    "many values": {"stop": ["a"] * 20_000},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "a grammar": {"structured_outputs": {"regex": "("}},
    "a long prompt": {"prompt": [1] * 5_000},
    "a longer prompt": {"prompt": [1] * 20_000},
    "a model": {"model": "none"},
    "a stream": {"prompt": [1] * 5_000, "stream": True},
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_refused_request_is_freed_at_once(hash_server, kind):
    """No cycle of an error and its frames keeps it for the garbage collector."""
    body = {"prompt": [1, 2], "max_tokens": 1, **FAILING[kind]}

    def fail():
        assert hash_server.send("POST", "/v1/completions", body)[0] in (400, 404)

    def kept():
        return sum(type(each) is Job for each in gc.get_objects())

    fail()
    with gc_disabled():
        gc.collect()
        before = kept()
        for _ in range(5):
            fail()
        until(lambda: kept() <= before + 1, 30)
