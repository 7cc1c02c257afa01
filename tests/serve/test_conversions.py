"""Bounds of token conversion, and of what is read before a request is admitted."""

from __future__ import annotations

import socket
import sys
import threading
import time

import pytest

from http_servers import HashServer
from inl.checkpoints.hub.resolve import resolve_model
from inl.executor.model_loader import open_model
from inl.serve import bounded_calls, connections, conversions, gate
from model_servers import ModelServer, Source
from waiting import until

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer():
    return open_model(resolve_model(None)).checkpoint.tokenizer()


@pytest.fixture(scope="module")
def server():
    with HashServer(max_queued_tokens=500) as server:
        yield server


def test_long_texts_have_the_same_tokens(tokenizer):
    text = "".join(
        f"Item {number}, <|im_end|> \u00e9\U0001f600; " for number in range(400)
    )
    ids = tokenizer.encode(text)
    assert ids == tokenizer.rules.encode(text).ids
    assert tokenizer.decode(ids, False) == tokenizer.rules.decode(
        ids, skip_special_tokens=False
    )


@pytest.mark.parametrize("name", ["encode", "decode"])
def test_other_threads_run_during_a_long_conversion(tokenizer, name):
    value = "some words of text, again " * 40_000
    if name == "decode":
        value = tokenizer.encode(value) * 8
    convert = getattr(tokenizer, name)
    convert(value)  # what is made once is made
    states = []

    def work():
        states.append("began")
        convert(value)
        states.append("ended")

    interval = sys.getswitchinterval()
    # Threads take turns only where one lets the others run.
    sys.setswitchinterval(1000)
    try:
        for _ in range(8):
            states.clear()
            thread = threading.Thread(target=work)
            thread.start()
            seen = [*states]
            while thread.is_alive() and seen != ["began"]:
                time.sleep(0.001)
                seen = [*states]
            thread.join()
            if seen == ["began"]:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("this thread never ran during a conversion")


def test_a_text_of_too_many_tokens_is_refused(server):
    status, _, body = server.send("POST", "/tokenize", {"prompt": "a b " * 12_000})
    assert (status, body["error"]["param"]) == (400, "prompt")
    assert "accepts up to 500 tokens" in body["error"]["message"]
    many = {"messages": [{"role": "user", "content": "a b " * 12_000}]}
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        status, _, body = server.send("POST", path, many)
        assert status == 400
        assert "the context holds" in body["error"]["message"]
    # More than the context, which is 1024, may be counted.
    text = {"messages": [{"role": "user", "content": "a b " * 700}]}
    status, _, body = server.send("POST", "/v1/messages/count_tokens", text)
    assert status == 200
    assert body["input_tokens"] > 1024


def test_conversions_are_bounded_apart_from_requests_that_generate(monkeypatch):
    made = []

    class RecordedCalls(bounded_calls.BoundedCalls):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(conversions, "BoundedCalls", RecordedCalls)
    slow, other = Source("slow"), Source("other", seconds=0.01)
    slow.may_open.clear()
    most = conversions.RUNNING + bounded_calls.QUEUE
    with ModelServer(other, slow, max_queue=0) as server:
        assert server.complete("other")[0] == 200  # it is loaded
        host, port = server.url.removeprefix("http://").split(":")
        body = b'{"model": "slow", "prompt": "a"}'
        head = "POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        clients = [socket.create_connection((host, int(port))) for _ in range(most)]
        for client in clients:
            client.sendall(request)
        (calls,) = made
        # A request that is sent meanwhile could take the place of one of these.
        until(lambda: calls.admission.open == most)
        sent = server.send("POST", "/detokenize", {"tokens": [1]})
        status, headers, answer = sent
        assert (status, answer["error"]["code"]) == (503, "queue_full")
        assert int(headers["retry-after"]) >= 1
        assert server.complete("other")[0] == 200
        slow.may_open.set()
        for client in clients:
            client.settimeout(300)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.close()


def test_an_unfinished_message_has_the_tokens_that_a_chat_goes_on_from(server):
    messages = [{"role": "user", "content": "Hi"}]
    messages.append({"role": "assistant", "content": "Good"})
    counts = {}
    for goes_on in (False, True):
        body = {"messages": messages, "continue_final_message": goes_on}
        if goes_on:
            body["add_generation_prompt"] = False
        counts[goes_on] = server.send("POST", "/tokenize", body)[2]["count"]
        body |= {"max_tokens": 1, "return_hidden_states": False}
        body |= {"include_reasoning": True}
        status, _, answer = server.send("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] == counts[goes_on]
    assert counts[True] < counts[False]


def test_an_unknown_token_is_refused(server):
    status, _, body = server.send("POST", "/detokenize", {"tokens": [1, 10**9]})
    assert (status, body["error"]["param"]) == (400, "tokens")
    assert "tokens[1]: found 1000000000" in body["error"]["message"]


def test_a_full_server_converts_tokens():
    with HashServer(max_batch=1, max_queue=0) as server, server.busy():
        status, _, found = server.send("POST", "/tokenize", {"prompt": "a"})
        assert (status, found["count"]) == (200, 1)


def begin(server, path, length, body=b"", headers=""):
    """Send the head of a request and the beginning of its body."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=300)
    lines = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}"
    client.sendall(f"{lines}content-length: {length}\r\n\r\n".encode() + body)
    return client


def received(client):
    """Return all that is received until the answer's JSON object is complete."""
    answer = b""
    while not answer.endswith(b"}"):
        part = client.recv(4096)
        assert part, answer
        answer += part
    return answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_full_server_refuses_before_it_reads_the_body(path):
    with HashServer(max_batch=1, max_queue=0) as server, server.busy():
        with begin(server, path, 1_000_000) as client:
            answer = received(client)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: " in answer
        assert b"overloaded_error" in answer
        assert server.admission.rejected == 1


def test_a_key_over_its_bound_is_refused_before_the_body():
    settings = {"api_keys": ("one", "two"), "max_per_key": 1}
    with HashServer(**settings) as server:
        key = {"authorization": "Bearer one"}
        with server.busy(key):
            header = "authorization: Bearer one\r\n"
            for path in ("/v1/completions", "/tokenize"):
                with begin(server, path, 1_000_000, headers=header) as client:
                    assert client.recv(4096).startswith(b"HTTP/1.1 429")
            other = {"authorization": "Bearer two"}
            assert server.send("POST", "/tokenize", {"prompt": "a"}, other)[0] == 200


def test_bodies_of_a_key_leave_room_for_those_of_others(monkeypatch):
    monkeypatch.setattr(gate, "OPEN_BYTES", 100_000)
    monkeypatch.setattr(connections, "BODY_BYTES", 1)  # each byte is counted at once
    keys = [f"authorization: Bearer {key}\r\n" for key in ("one", "two")]
    with HashServer(max_body_bytes=40_000, api_keys=("one", "two")) as server:
        part = b'{"prompt": "' + b"a" * 29_988
        path = "/v1/completions"
        held = [begin(server, path, 40_000, part, headers=keys[0])]
        until(lambda: server.server.app._held_of["key 0"] >= 24_000)
        with begin(server, path, 40_000, part, headers=keys[0]) as client:
            answer = received(client)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"this key's open requests" in answer
        held.append(begin(server, path, 40_000, part, headers=keys[1]))
        until(lambda: server.server.app._held_of["key 1"] >= 24_000)
        for client in held:
            client.close()
        until(lambda: not server.server.app._held)
        assert not server.server.app._held_of


def test_bodies_of_open_requests_are_bounded_together(monkeypatch):
    monkeypatch.setattr(gate, "OPEN_BYTES", 90_000)
    monkeypatch.setattr(connections, "BODY_BYTES", 1)  # each byte is counted at once
    with HashServer(max_body_bytes=40_000) as server:
        part = b'{"prompt": "' + b"a" * 29_988
        held = [begin(server, "/v1/completions", 40_000, part) for _ in range(3)]
        until(lambda: server.server.app._held >= 3 * 24_000)
        with begin(server, "/tokenize", 40_000, part) as client:
            answer = received(client)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
        for client in held:
            client.close()
        until(lambda: not server.server.app._held)
        body = {"prompt": PROMPT, "max_tokens": 1, "suffix": None}
        assert server.send("POST", "/v1/completions", body)[0] in (200, 400)
        status, _, _ = server.send("POST", "/tokenize", part + b'"}')
        assert status == 200


def test_tokenizer_info_has_special_tokens_and_template(hash_server):
    status, _, info = hash_server.send("GET", "/tokenizer_info")
    assert status == 200
    engine = hash_server.engine
    assert info["eos_token"] == (engine.tokenizer.eos_token or None)
    assert info["bos_token"] == (engine.tokenizer.bos_token or None)
    assert info["vocab_size"] == engine.tokenizer.vocab_size
    template = engine.chat_template
    assert info["chat_template"] == (template and template.source)
    status, _, answer = hash_server.send("GET", "/tokenizer_info?model=other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
