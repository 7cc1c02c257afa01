"""Header values that are no values of their header: an error of the client, named."""

from __future__ import annotations

import asyncio
import json

import pytest

from http_servers import hash_engine
from inl.config import EngineConfig
from inl.serve.model_slot import ModelSource
from inl.serve.server import Server, engine_config
from inl.serve.settings import ServerConfig


@pytest.fixture(scope="module")
def apps():
    """Applications of a loopback address, and of all addresses with keys."""
    found = {}
    servers = []
    for name, options in {
        "loopback": {},
        "open": {"host": "0.0.0.0", "api_keys": ("k",), "admin_keys": ("a",)},
    }.items():
        config = ServerConfig(**options)

        def open_engine(on_step, config=config):
            settings = engine_config(EngineConfig(), config, 2)
            return hash_engine(2, config=settings, on_step=on_step)

        server = Server([ModelSource("hash", open_engine)], config, max_batch=2)
        servers.append(server)
        found[name] = server.app
    yield found
    for server in servers:
        server.close()


def ask(app, headers, path="/v1/models", method="GET", body=b""):
    """Return the status and the body of an answer; raises what the app raises."""
    parts, status = [], 0

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = {"type": "http", "method": method, "path": path, "query_string": b""}
    given = {b"host": b"localhost", **headers}
    scope |= {"headers": list(given.items()), "root_path": "", "scheme": "http"}
    asyncio.run(app(scope, receive, send))
    return status, b"".join(parts)


URLS = [
    b"http://[", b"http://]", b"http://[::1", b"[", b"//[", b"http://[::1]x:9/",
    b"http://a\xe2\x84\x80b", b"\xff", b"null", b"http://h:999999999", b"",
]  # fmt: skip


@pytest.mark.parametrize("origin", URLS)
def test_an_origin_that_is_no_url_is_refused(apps, origin):
    for headers in ({b"origin": origin}, {b"origin": origin, b"host": b""}):
        status, body = ask(apps["loopback"], headers)
        assert status == 403
        assert json.loads(body)["error"]["message"]
    key = {b"origin": origin, b"host": b"", b"authorization": b"Bearer k"}
    assert ask(apps["open"], key)[0] == 403


@pytest.mark.parametrize("host", [*URLS, b"[::1", b"a@b", b":"])
def test_a_host_that_is_no_name_is_refused_or_ignored(apps, host):
    assert ask(apps["loopback"], {b"host": host})[0] == 403
    key = {b"host": host, b"authorization": b"Bearer k"}
    assert ask(apps["open"], key)[0] == 200
    # Errors of all layers are answered too.
    assert ask(apps["open"], key, "/nowhere")[0] == 404
    assert ask(apps["open"], key, "/v1/models", "PUT")[0] == 405
    assert ask(apps["open"], key, "/v1/embeddings", "POST", b"[")[0] == 400
    admin = {**key, b"authorization": b"Bearer a"}
    assert ask(apps["open"], admin, "/sleep", "POST")[0] in (200, 400)
    assert ask(apps["open"], admin, "/wake_up", "POST")[0] == 200
    assert ask(apps["open"], key, "/", "GET")[0] == 200


LENGTHS = ["\xb2", "-1", "+1", "1_0", " ", "", "1" * 21, "7" * 5_000, "1, 1", "0x10"]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_that_is_no_number_is_refused(apps, length):
    headers = {b"content-length": length.encode("latin-1")}
    status, body = ask(apps["loopback"], headers, "/v1/completions", "POST")
    assert status == 400
    assert b"content-length" in body
    assert len(body) < 300


@pytest.mark.parametrize(
    "value", [b"", b"Bearer", b"Bearer ", b"bearer \xff\xfe", b"Basic k", b"\x00", b"k"]
)
def test_a_key_that_is_none_is_refused(apps, value):
    assert ask(apps["open"], {b"authorization": value})[0] == 401
    assert ask(apps["open"], {b"x-api-key": value + b"!"})[0] == 401


@pytest.mark.parametrize("kind", [b"", b"\xff", b"text/plain; charset=nowhere", b";="])
def test_the_type_of_a_body_is_not_read(apps, kind):
    body = b'{"prompt": [1, 2], "max_tokens": 1}'
    headers = {b"content-type": kind, b"content-encoding": kind}
    found = ask(apps["loopback"], headers, "/tokenize", "POST", b'{"prompt": "a"}')
    assert found[0] == 200
    assert ask(apps["loopback"], headers, "/v1/nothing", "POST", body)[0] == 404
