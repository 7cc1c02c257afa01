"""Garbage: requests leave none, and it is collected while few connections are open."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from http_servers import HashServer
from inl.garbage_collection import NEVER, only_young_collections
from inl.serve import http_server
from inl.serve.http_server import HttpServer, loop_factory
from inl.serve.settings import ServerConfig
from waiting import until

pytestmark = pytest.mark.skipif(
    loop_factory() is None, reason="needs uvloop: asyncio's own transports are cycles"
)

TURN = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = {"messages": [TURN], "max_tokens": 3}
IDS = {"prompt": [1], "max_tokens": 3}
WRONG = {"name": "a", "schema": {"type": "foo"}}
BODIES = {
    "text": (TEXT, IDS),
    "samples": (TEXT, IDS | {"n": 3, "logprobs": 2}),
    "text stream": (TEXT, IDS | {"stream": True}),
    "chat": (CHAT, TALK | {"logprobs": True}),
    "chat stream": (CHAT, TALK | {"stream": True}),
    "tools": (CHAT, TALK | {"tools": [TOOL]}),
    "forced call": (CHAT, TALK | {"tools": [TOOL], "tool_choice": "required"}),
    "one call": (CHAT, TALK | {"tools": [TOOL], "parallel_tool_calls": False}),
    "schema": (CHAT, TALK | {"response_format": {"type": "json_object"}}),
    "messages": ("/v1/messages", TALK),
    "messages stream": ("/v1/messages", TALK | {"stream": True}),
    "responses": ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
    "ollama": ("/api/chat", {"messages": [TURN], "options": {"num_predict": 3}}),
    "tokenize": ("/tokenize", {"prompt": "a"}),
    "embeddings": ("/v1/embeddings", {"input": "a"}),
    "count": ("/v1/messages/count_tokens", {"messages": [TURN]}),
    "wrong type": (TEXT, IDS | {"max_tokens": "a"}),
    "wrong value": (TEXT, IDS | {"temperature": -4}),
    "null": (TEXT, IDS | {"stop": None, "n": None}),
    "wrong null": (TEXT, IDS | {"stop": None, "n": "a"}),
    "wrong schema": (
        CHAT,
        TALK | {"response_format": {"type": "json_schema", "json_schema": WRONG}},
    ),
    "wrong tool": (CHAT, TALK | {"tools": [TOOL | {"type": "x"}]}),
    "long prompt": (TEXT, IDS | {"prompt": [1] * 4000}),
    "unknown model": (TEXT, IDS | {"model": "x"}),
    "unknown path": ("/v1/x", {}),
    "no JSON": (TEXT, None),
}
HALVES = {
    "nothing": b"",
    "half a head": b"GET /health HTTP/1.1\r\nx: ",
    "half a body": b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n"
    b"content-length: 100000\r\n\r\nx",
    "no HTTP": b"\x16\x03\x01\r\n\r\n",
    "pipeline": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10,
    "many pipelined": b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 40,
    "many headers": b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 200,
    "a stream left": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"content-length: 53\r\n\r\n"
    b'{"prompt":[1],"max_tokens":800,"stream":true,"n":  1}',
}


@pytest.fixture(scope="module")
def server():
    with HashServer(loop_factory=loop_factory()) as it:
        yield it


def connect(server):
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=300)


def exchange(server, path, body):
    """Send a request on a connection of its own, and read all of the answer."""
    data = b"{{" if body is None else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    with connect(server) as client:
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        while client.recv(1 << 16):
            """Until the server closes the connection."""


def leave(server, data):
    """Send data, and leave once the server has read them."""
    with connect(server) as client:
        client.sendall(data)
        exchange(server, "/tokenize", {"prompt": "a"})


def garbage_of(server, send):
    """Return the types of the objects that some requests leave in cycles."""

    def settle():
        server.wait_idle()
        until(lambda: not server.server._http._server.server_state.connections)

    send()
    settle()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            send()
        settle()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [type(each).__name__ for each in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("kind", BODIES)
def test_requests_leave_no_cycles(server, kind):
    """Only a collection of all objects would free them, which stalls the event loop."""
    found = garbage_of(server, lambda: exchange(server, *BODIES[kind]))
    assert len(found) < 5, found[:30]


@pytest.mark.parametrize("kind", HALVES)
def test_clients_that_leave_leave_no_cycles(server, kind):
    found = garbage_of(server, lambda: leave(server, HALVES[kind]))
    assert len(found) < 5, found[:30]


def test_this_check_can_fail(server):
    def send():
        knot = []
        knot.append(knot)

    assert garbage_of(server, send) == ["list"] * 5


def test_blocks_without_full_collections_overlap():
    before = gc.get_threshold()
    first, second = only_young_collections(), only_young_collections()
    with first:
        assert gc.get_threshold() == (*before[:2], NEVER)
        second.__enter__()
    assert gc.get_threshold() == (*before[:2], NEVER)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_a_server_keeps_full_collections_away(server):
    assert gc.get_threshold()[2] == NEVER
    server.wait_idle()


@pytest.mark.parametrize(
    ("connections", "most", "collects"), [(1, 1e9, True), (9, 1e9, False), (9, 0, True)]
)
def test_all_garbage_is_collected_while_few_connections_are_open(
    monkeypatch, connections, most, collects
):
    server = HttpServer(None, ServerConfig())
    server._connections = SimpleNamespace(count=connections)
    monkeypatch.setattr(http_server, "FEW_CONNECTIONS", 5)
    monkeypatch.setattr(http_server, "MOST_COLLECT_SECONDS", most)
    monkeypatch.setattr(http_server, "COLLECT_SECONDS", 0)
    full = []
    collector = SimpleNamespace(
        get_count=lambda: (0, 0, 11), collect=lambda: full.append(threading.get_ident())
    )
    monkeypatch.setattr(http_server, "gc", collector)

    async def turns():
        collecting = asyncio.create_task(server._collect_garbage())
        for _ in range(20):
            await asyncio.sleep(0)
        collecting.cancel()

    asyncio.run(turns())
    assert (threading.get_ident() in full) == collects
