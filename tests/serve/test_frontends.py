"""Front-end processes: the same answers, bounds and ends as the engine's own server."""

from __future__ import annotations

import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from http_servers import HashServer
from inl.cli.serve_models import count_frontends
from inl.errors import RequestError
from waiting import until

FRONTENDS = 2

TALK = [{"role": "user", "content": "Name three rivers."}]
TOOL = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
TOOL |= {"required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "weather", "parameters": TOOL}
NAMED = {"type": "function", "function": {"name": "weather"}}

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
REQUESTS = {
    "chat": (CHAT, {"messages": TALK, "seed": 3}),
    "logprobs": (CHAT, {"messages": TALK, "seed": 4, "logprobs": True}
                 | {"top_logprobs": 3, "n": 2}),
    "tools": (CHAT, {"messages": TALK, "seed": 5, "max_tokens": 60}
              | {"tools": [{"type": "function", "function": FUNCTION}]}
              | {"tool_choice": NAMED}),
    "schema": (CHAT, {"messages": TALK, "seed": 6, "max_tokens": 60}
               | {"response_format": {"type": "json_schema", "json_schema":
                  {"name": "city", "schema": TOOL}}}),
    "texts": (TEXT, {"prompt": ["A river", [5, 6, 7]], "seed": 7, "n": 2}
              | {"return_token_ids": True, "logprobs": 1}),
    "options": (TEXT, {"prompt": "A river", "seed": 8, "logit_bias": {"70": 4}}
                | {"allowed_token_ids": list(range(40, 90)), "min_tokens": 3}),
    "responses": ("/v1/responses", {"input": "Name three rivers.", "temperature": 0}
                  | {"max_output_tokens": 12}),
    "messages": ("/v1/messages", {"model": "hash", "messages": TALK, "max_tokens": 12}
                 | {"temperature": 0}),
    "ollama": ("/api/chat", {"messages": TALK, "options": {"temperature": 0}
               | {"num_predict": 12}, "stream": False}),
    "ollama context": ("/api/generate", {"prompt": "Three?", "context": [1, 50, 60]}
                       | {"options": {"temperature": 0, "num_predict": 5}}
                       | {"stream": False}),
    "refused": (CHAT, {"messages": TALK, "guided_json": 3}),
    "too long": (TEXT, {"prompt": [5] * 2000}),
    "unknown": (TEXT, {"prompt": "A", "model": "other"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def served():
    with HashServer(max_batch=4, max_queue=4, frontends=FRONTENDS) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    with HashServer(max_batch=4, max_queue=4) as server:
        yield server


def without_names(value):
    """Return a body without what differs from one call to another."""
    if isinstance(value, dict):
        changing = {"id", "item_id", "created", "created_at", "completed_at", "call_id"}
        changing |= {name for name in value if name.endswith("_duration")}
        return {
            name: without_names(item)
            for name, item in value.items()
            if name not in changing
        }
    return [*map(without_names, value)] if isinstance(value, list) else value


def streamed(text):
    """Return texts, ids, scores and ends of a stream, however it is divided."""
    parts, ends = {}, []

    def add(value, path):
        if isinstance(value, dict):
            for name, item in value.items():
                add(item, (*path, name))
        elif isinstance(value, list):
            for item in value:
                at = item.get("index") if isinstance(item, dict) else None
                add(item, (*path, at))
        elif path[-1] in (
            "content", "text", "delta", "arguments", "partial_json", "response",
        ):  # fmt: skip
            parts[path] = parts.get(path, "") + str(value or "")
        elif path[-1] in (
            "finish_reason",
            "stop_reason",
            "done_reason",
            "completion_tokens",
        ):
            ends.append((path, value))
        elif isinstance(value, float):
            parts[path] = [*parts.get(path, []), value]

    for line in text.decode().splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            event = json.loads(data)
            by = event.get("type"), *(c["index"] for c in event.get("choices", ()))
            add(without_names(event), by)
    # Choices that end in the same step may end in either order.
    return parts, sorted(repr(end) for end in ends if end[1] is not None)


@pytest.mark.parametrize("name", REQUESTS)
def test_answers_and_streams_are_those_of_the_engine_s_own_server(name, served, plain):
    path, body = REQUESTS[name]
    if path in (CHAT, TEXT):
        body = {"max_tokens": 12, **body}
    found, wanted = (each.send("POST", path, body) for each in (served, plain))
    assert found[0] == wanted[0]
    assert without_names(found[2]) == without_names(wanted[2])
    if wanted[0] == 200:
        body = {**body, "stream": True}
        found, wanted = (each.send("POST", path, body) for each in (served, plain))
        assert streamed(wanted[2])[0], "something was streamed"
        assert streamed(found[2]) == streamed(wanted[2])
    served.wait_idle()


def test_a_stop_string_ends_the_request_in_the_engine_s_process(served, plain):
    body = {"prompt": "A river", "seed": 8, "max_tokens": 400, "ignore_eos": True}
    text = plain.send("POST", TEXT, body)[2]["choices"][0]["text"]
    body["stop"] = [text[60:64]]
    wanted = plain.send("POST", TEXT, body)[2]
    began = served.engine.stats.steps
    with served.paused() as gate:
        gate.hold_after(100)
        found = served.send("POST", TEXT, body)[2]
        until(lambda: not served.admission.open)
    assert without_names(found) == without_names(wanted)
    assert found["choices"][0]["finish_reason"] == "stop"
    served.wait_idle()
    assert served.engine.stats.steps - began < 110
    assert b'finished_reason="stop"' in served.send("GET", "/metrics")[2]


def test_bounds_and_figures_are_of_all_front_ends_together(served):
    before = served.engine.stats.tokens, served.admission.rejected
    body = {"prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True}
    with ThreadPoolExecutor(24) as pool, served.paused() as gate:
        asked = [pool.submit(served.send, "POST", TEXT, body) for _ in range(24)]
        until(lambda: served.admission.rejected - before[1] == 16)
        gate.release()
        answers = [each.result() for each in asked]
    refused = [each for each in answers if each[0] == 503]
    assert len(refused) == 16
    assert all(int(headers["retry-after"]) >= 1 for _, headers, _ in refused)
    assert {each[0] for each in answers} == {200, 503}
    load = served.send("GET", "/load")[2]
    assert load["rejected"] == before[1] + len(refused)
    assert load["computed_tokens"] > before[0]
    served.wait_idle()


def long_stream(server, **options):
    """Return a socket on which a long stream has begun."""
    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True}
    data = json.dumps({**body, "stream": True, **options}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    client = socket.create_connection((host, int(port)), timeout=300)
    client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    return client


def test_a_client_that_disconnects_frees_its_blocks(served):
    began = served.engine.stats.steps
    with served.paused() as gate:
        streams = [long_stream(served) for _ in range(3)]
        served.wait_submitted(3)
        gate.hold_after(20)
        assert gate.is_held.wait(300)
        assert served.used_blocks
        for stream in streams:
            stream.close()
        until(lambda: not served.admission.open)
    served.wait_idle()
    assert served.engine.stats.steps - began < 30


def test_a_front_end_that_is_killed_is_replaced_and_its_requests_end(served):
    began = served.engine.stats.steps
    with served.paused() as gate:
        streams = [long_stream(served) for _ in range(4)]
        served.wait_submitted(4)
        gate.hold_after(20)
        assert gate.is_held.wait(300)
        killed = [each.pid for each in served.server.frontends.processes]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not served.admission.open)
    served.wait_idle()
    assert served.engine.stats.steps - began < 30, "they were aborted"
    for stream in streams:
        stream.close()
    processes = served.server.frontends.processes
    until(lambda: killed[0] not in [each.pid for each in processes])
    # The sockets stayed open: a request of this moment waits for the new process.
    assert served.send("POST", TEXT, {"prompt": "A", "max_tokens": 2})[0] == 200
    served.wait_idle()


def test_stopping_finishes_the_open_streams_and_ends_all_processes():
    with HashServer(frontends=1, drain_seconds=300) as server:
        options = {"include_usage": True}
        with server.paused():
            client = long_stream(server, max_tokens=100, stream_options=options)
            server.stop()
        with client:
            parts = []
            while part := client.recv(1 << 16):
                parts.append(part)
        pid = server.server.frontends.processes[0].pid
    rest = b"".join(parts)
    assert b'"completion_tokens":100' in rest
    assert b"data: [DONE]" in rest
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_number_of_front_ends(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert count_frontends("auto", "cpu", otel=False) == 0
    assert count_frontends("3", "cpu", otel=False) == 3
    for given, otel in (("2", True), ("-1", False), ("many", False), ("65", False)):
        with pytest.raises(RequestError, match="--frontends: found"):
            count_frontends(given, "cpu", otel=otel)
