"""Random requests of our own description: answered as the engine does, or refused."""

from __future__ import annotations

import json
import os
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from depth import examples
from http_servers import HashServer, hash_engine
from inl.errors import RequestError
from inl.serve.gate import ADMIN_PATHS
from inl.serve.openapi import openapi
from json_values import ANY, damaged, values

DESCRIPTION = openapi()
COMPONENTS = DESCRIPTION["components"]["schemas"]
POSTS = {
    path: each["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path, each in DESCRIPTION["paths"].items()
    if "post" in each
}
COUNT = int(os.environ.get("INL_FUZZ_REQUESTS", "0")) // 2
"""Number of requests of each test; replaces the number of the test depth."""

LIMITS = {"max_tokens": 2, "max_output_tokens": 2, "max_completion_tokens": 2, "n": 2}
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def bounded(path, body):
    """Return a body whose answer is short."""
    fields = COMPONENTS[POSTS[path]["$ref"].rpartition("/")[2]]["properties"]
    if path in ("/api/chat", "/api/generate"):
        options = body.get("options")
        body["options"] = {**(options or {}), "num_predict": 2}
    for name, most in LIMITS.items():
        if name not in fields:
            continue
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
        elif body.get(name) is None and name != "n":
            body[name] = most
    return body


def is_error(path, body):
    if path.startswith("/v1/messages"):
        return body["type"] == "error" and isinstance(body["error"]["message"], str)
    if path.startswith("/api/"):
        return set(body) == {"error"} and isinstance(body["error"], str)
    return set(body["error"]) == {"message", "type", "param", "code"}


@examples(COUNT or 80, COUNT or 400, suppress_health_check=QUIET)
@given(data=st.data())
def test_a_request_is_answered_or_refused_in_its_dialect(any_hash_server, data):
    path = data.draw(st.sampled_from(sorted(POSTS)))
    valid = values(POSTS[path], COMPONENTS).map(lambda body: bounded(path, body))
    body = data.draw(valid | damaged(valid) | ANY | st.binary(max_size=20))
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, headers, answer = any_hash_server.send("POST", path, sent)
    assert status in (200, 400, 404), answer
    if status != 200:
        assert is_error(path, answer)
    elif headers.get_content_type() == "text/event-stream":
        assert b"data: " in answer
        assert b'"error"' not in answer.replace(b'"error":null', b"")
    elif headers.get_content_type() == "application/x-ndjson":
        last = json.loads(answer.splitlines()[-1])
        assert last["done"] is True
    any_hash_server.wait_idle()


ADMIN = {
    path: each["post"]
    for path, each in openapi(has_admin=True)["paths"].items()
    if "post" in each and path not in POSTS
}
ADMIN_COMPONENTS = openapi(has_admin=True)["components"]["schemas"]
OPERATOR = {"authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def admin_server():
    with HashServer(max_batch=4, admin_keys=("operator",)) as server:
        yield server


def admin_bodies(path):
    given = ADMIN[path].get("requestBody")
    if given is None:
        return st.none() | ANY
    valid = values(given["content"]["application/json"]["schema"], ADMIN_COMPONENTS)
    return valid | damaged(valid) | ANY | st.binary(max_size=20)


PARAMETERS = st.dictionaries(
    st.sampled_from(["model", "level", "mode", "tags", "x"]),
    st.sampled_from(["hash", "1", "2", "wait", "abort", "", "%"]),
    max_size=2,
)


@examples(COUNT or 6, COUNT or 40, suppress_health_check=QUIET)
@given(data=st.data(), path=st.sampled_from(sorted(ADMIN)), query=PARAMETERS)
def test_an_admin_request_is_answered_or_refused(admin_server, data, path, query):
    body = data.draw(admin_bodies(path))
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{path}?{urlencode(query)}"
    status, _, answer = admin_server.send("POST", url, sent, OPERATOR)
    assert status in (200, 400, 404), answer
    assert status == 200 or is_error(path, answer)
    assert admin_server.send("POST", url, sent)[0] == 401, "another key, or none"
    if path == "/sleep":
        assert admin_server.send("POST", "/wake_up", None, OPERATOR)[0] == 200
    short = {"prompt": [1, 2], "max_tokens": 1}
    assert admin_server.send("POST", "/v1/completions", short)[0] == 200


def test_every_admin_endpoint_that_changes_something_is_fuzzed():
    assert {*ADMIN} == ADMIN_PATHS - {"/is_sleeping"}


SAMPLING = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 49151), min_size=1, max_size=40),
        "seed": st.integers(-(2**63), 2**63 - 4),
        "max_tokens": st.integers(1, 6),
        "n": st.integers(1, 3),
    },
    optional={
        "temperature": st.sampled_from([0, 0.5, 1, 2.5]),
        "top_p": st.floats(1e-6, 1),
        "top_k": st.integers(0, 100),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(
            st.integers(0, 49151).map(str), st.floats(-100, 100), max_size=3
        ),
        "allowed_token_ids": st.lists(st.integers(0, 49151), min_size=1, max_size=5),
        "stop_token_ids": st.lists(st.integers(0, 49151), max_size=3),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 1),
        "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=2),
        "cache_salt": st.text(max_size=3),
    },
)
RENAMED = {"stop_token_ids": "stop_ids"}


@pytest.fixture(scope="module")
def twin():
    with hash_engine(4) as engine:
        yield engine


@examples(COUNT or 60, COUNT or 200, suppress_health_check=QUIET)
@given(body=SAMPLING, stream=st.booleans())
def test_tokens_are_the_engines(any_hash_server, twin, body, stream):
    sent = {**body, "stream": stream, "return_token_ids": True}
    status, _, answer = any_hash_server.send("POST", "/v1/completions", sent)
    options = {RENAMED.get(name, name): value for name, value in body.items()}
    prompt, count = options.pop("prompt"), options.pop("n")
    bias = options.get("logit_bias") or {}
    options["logit_bias"] = {int(token): value for token, value in bias.items()}
    options.setdefault("temperature", 1.0)
    seed = options.pop("seed")

    def generate():
        return [
            list(twin.generate(prompt, **options, seed=seed + number).token_ids)
            for number in range(count)
        ]

    expected, refusal = refused(generate)
    if refusal:
        assert refusal in str(answer)
        assert status == (200 if stream else 400)
        any_hash_server.wait_idle()
        return
    assert status == 200, answer
    assert token_ids(answer, count, stream) == expected
    any_hash_server.wait_idle()


def refused(generate):
    """Return a result and the message of a refusal: the options exclude each other."""
    try:
        return generate(), ""
    except RequestError as error:
        return None, str(error)


def token_ids(answer, count, stream):
    if not stream:
        return [choice["token_ids"] for choice in answer["choices"]]
    found = [[] for _ in range(count)]
    for event in answer.decode().split("\n\n"):
        data = event.removeprefix("data: ")
        if data and data != "[DONE]":
            for choice in json.loads(data)["choices"]:
                found[choice["index"]] += choice["token_ids"]
    return found
