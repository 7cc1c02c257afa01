"""Keys, hosts, origins, body sizes and error shapes."""

from __future__ import annotations

import socket

import pytest

from depth import mostly_long
from http_servers import HashServer

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.fixture(scope="module", params=mostly_long([0, 2]))
def guarded(request):
    options = {"api_keys": ("one", "two"), "max_per_key": 2, "max_body_bytes": 5000}
    options |= {"cors_origins": ("https://app.example",), "frontends": request.param}
    with HashServer(**options) as server:
        yield server


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [bearer("one"), {"x-api-key": "two"}])
def test_each_key_is_accepted(guarded, headers):
    assert guarded.send("POST", CHAT, BODY, headers)[0] == 200


@pytest.mark.parametrize(
    "headers", [{}, bearer(""), bearer("three"), bearer("on"), {"x-api-key": "öne"}]
)
def test_other_keys_are_refused(guarded, headers):
    headers = {k: v.encode() for k, v in headers.items()}
    status, answered, body = guarded.send("POST", CHAT, BODY, headers)
    assert status == 401
    assert answered["www-authenticate"] == "Bearer"
    assert body["error"]["type"] == "authentication_error"
    status, _, body = guarded.send("POST", "/v1/messages", BODY, headers)
    assert (status, body["type"]) == (401, "error")


def test_probes_need_no_key(guarded):
    assert guarded.send("GET", "/health")[0] == 200
    assert guarded.send("GET", "/ready")[0] == 200
    assert guarded.send("GET", "/metrics")[0] == 401


def test_open_requests_of_a_key_are_bounded(guarded):
    status, headers, body = guarded.send("POST", CHAT, {**BODY, "n": 3}, bearer("one"))
    assert status == 429
    assert int(headers["retry-after"]) >= 1
    assert body["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("is_chunked", [False, True])
def test_large_bodies_are_refused(guarded, is_chunked):
    data = b"x" * 6000
    body = iter([data[:3000], data[3000:]]) if is_chunked else data
    with guarded.connection() as connection:
        connection.request("POST", CHAT, body, bearer("one"), encode_chunked=is_chunked)
        response = connection.getresponse()
        assert response.status == 413
        assert b"--max-body" in response.read()


def test_pages_of_other_hosts_are_refused(guarded):
    key = bearer("one")
    host = {"host": "evil.example"}
    assert guarded.send("GET", "/v1/models", headers=key | host)[0] == 403
    origin = {"origin": "https://evil.example"}
    status, headers, _ = guarded.send("POST", CHAT, BODY, key | origin)
    assert status == 403
    assert "access-control-allow-origin" not in headers
    origin = {"origin": "https://app.example"}
    status, headers, _ = guarded.send("POST", CHAT, BODY, key | origin)
    assert status == 200
    assert headers["access-control-allow-origin"] == "https://app.example"
    status, headers, _ = guarded.send("OPTIONS", CHAT, None, origin)
    assert status == 204
    assert "POST" in headers["access-control-allow-methods"]


def test_paths_and_methods_that_do_not_exist(hash_server):
    assert hash_server.send("GET", "/v2/x")[2]["error"]["type"] == "not_found_error"
    status, headers, body = hash_server.send("GET", CHAT)
    assert status == 405
    assert headers["allow"] == "POST"
    assert "message" in body["error"]


def test_tokens_and_texts_are_converted(hash_server):
    body = {"prompt": "Hello world", "return_token_strs": True}
    answer = hash_server.send("POST", "/tokenize", body)[2]
    assert answer["token_strs"] == ["Hello", " world"]
    body = {"tokens": answer["tokens"]}
    assert hash_server.send("POST", "/detokenize", body)[2] == {"prompt": "Hello world"}
    answer = hash_server.send("POST", "/tokenize", {"messages": BODY["messages"]})[2]
    assert answer["count"] == len(hash_server.engine.chat_ids("a"))


def test_metrics_have_both_names_and_count(hash_server):
    hash_server.send("POST", CHAT, {**BODY, "max_tokens": 5})
    lines = hash_server.send("GET", "/metrics")[2].decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    labels = '{engine="0",model_name="hash"}'
    for name in ("generation_tokens_total", "e2e_request_latency_seconds_count"):
        assert float(values[f"vllm:{name}{labels}"]) > 0
        assert values[f"vllm:{name}{labels}"] == values[f"inl:{name}{labels}"]
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "num_preemptions_total", "iteration_tokens_total_count",
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
        "request_time_per_output_token_seconds_count", "prompt_tokens_total",
        "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "request_inference_time_seconds_count",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
    ):  # fmt: skip
        assert f"vllm:{name}{labels}" in values


def test_a_client_that_sends_half_a_body_and_leaves_is_no_error(hash_server):
    address = hash_server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                       b"content-length: 100\r\n\r\n{")  # fmt: skip
    hash_server.wait_idle()
    assert hash_server.send("GET", "/ready")[0] == 200
