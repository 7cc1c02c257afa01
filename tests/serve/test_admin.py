"""Admin endpoints: keys, sleep, aborted requests, prefixes and adapters."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from depth import mostly_full, mostly_long
from http_servers import HashServer
from inl import EngineConfig
from inl.checkpoints.checkpoint import open_checkpoint
from inl.checkpoints.hub.resolve import default_model
from inl.cli.serve_models import make_server
from inl.errors import RequestError
from inl.serve.gate import ADMIN_PATHS
from inl.serve.openapi import openapi
from inl.serve.settings import ServerConfig
from lora_files import LoraFiles
from waiting import until

TEXT = "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEY = {"authorization": "Bearer user"}
ADMIN = {"authorization": "Bearer operator"}
KEYS = {"api_keys": ("user",), "admin_keys": ("operator", "deputy")}
PROMPT = list(range(40, 90))
BODY = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "return_token_ids": True}
FRONTENDS = mostly_full([0, 2])


def command(server, path, body=None, headers=ADMIN):
    """Return status and body of an admin request."""
    method = "GET" if path == "/is_sleeping" else "POST"
    status, _, answer = server.send(method, path, body, headers)
    return status, answer


def tokens(server, **options):
    status, _, answer = server.send("POST", TEXT, {**BODY, **options}, KEY)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def resident_bytes():
    """Memory of this process, in which the engine runs."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", params=FRONTENDS)
def server(request):
    with HashServer(max_batch=2, frontends=request.param, **KEYS) as each:
        yield each


def test_each_endpoint_needs_an_admin_key(server):
    for path in ADMIN_PATHS:
        for headers in ({}, KEY, {"x-api-key": "operato"}):
            status, answer = command(server, path, {}, headers)
            assert status == 401, path
            assert answer["error"]["message"].startswith("admin key: found none")
    for headers in (ADMIN, {"x-api-key": "deputy"}):
        status, answer = command(server, "/is_sleeping", None, headers)
        assert (status, answer) == (
            200, {"is_sleeping": False, "models": {"hash": False}}
        )  # fmt: skip
    assert server.send("POST", TEXT, BODY, ADMIN)[0] == 401, "it is another key"
    paths = server.send("GET", "/openapi.json", None, KEY)[2]["paths"]
    assert set(paths) >= ADMIN_PATHS


def test_without_an_admin_key_there_are_no_such_endpoints(hash_server):
    for path in ADMIN_PATHS:
        assert command(hash_server, path, {})[0] == 404, path
    assert not set(openapi()["paths"]) & ADMIN_PATHS
    with pytest.raises(RequestError, match="admin key: found an api key"):
        ServerConfig(api_keys=("a",), admin_keys=("a",))
    with pytest.raises(RequestError, match="admin key: found an empty one"):
        ServerConfig(admin_keys=("",))


def test_what_is_not_accepted_is_named(server):
    for path, body, status, text in (
        ("/sleep?level=0", None, 400, "level: found '0', accepts 1 or 2"),
        ("/sleep?mode=keep", None, 400, "mode: found 'keep', accepts wait or abort"),
        ("/sleep?model=other", None, 404, "this server has hash"),
        ("/wake_up?tags=weights", None, 400, "tags: is not supported"),
        ("/abort_requests", {"request_ids": 3}, 400, "request_ids"),
        (LOAD, {"lora_name": "a"}, 400, "lora_path"),
        (LOAD, {"lora_name": "hash", "lora_path": "x"}, 400, "name of a model"),
        (LOAD, {"lora_name": "a", "lora_path": "x"}, 400, "no room for adapters"),
        (UNLOAD, {"lora_name": "hash"}, 404, "has the adapters None"),
    ):
        found, answer = command(server, path, body)
        assert found == status, answer
        assert text in answer["error"]["message"]
    assert command(server, "/is_sleeping")[1]["is_sleeping"] is False


def test_a_model_that_slept_gives_the_same_tokens(server):
    wanted = tokens(server)
    assert command(server, "/sleep?level=1") == (
        200, {"is_sleeping": True, "models": {"hash": True}}
    )  # fmt: skip
    for path, body in (
        (TEXT, BODY), ("/v1/messages", {}), ("/tokenize", {"prompt": "a"})
    ):  # fmt: skip
        status, headers, answer = server.send("POST", path, body, KEY)
        assert status == 503, path
        assert int(headers["retry-after"]) >= 1
        assert "asleep until /wake_up" in answer["error"]["message"]
    assert server.send("GET", "/ready")[::2] == (503, {"status": "asleep"})
    assert server.send("GET", "/health")[0] == 200
    models = server.send("GET", "/v1/models", None, KEY)[2]["data"]
    assert [each["is_loaded"] for each in models] == [False]
    assert command(server, "/sleep?level=2")[0] == 200, "again"
    assert command(server, "/wake_up")[1]["is_sleeping"] is False
    assert server.send("GET", "/ready")[0] == 200
    assert tokens(server) == wanted
    assert command(server, "/wake_up")[0] == 200, "again"


def test_open_requests_finish_or_are_aborted_before_a_model_sleeps(server):
    for mode in ("wait", "abort"):
        body = {**BODY, "max_tokens": 40, "ignore_eos": True}
        with server.paused() as gate:
            gate.hold_after(5)
            asked = server.begin("POST", TEXT, body, KEY)
            assert gate.is_held.wait(300)
            sleeping = server.begin("POST", f"/sleep?mode={mode}", None, ADMIN)
            until(lambda: server.admission.is_asleep)
            # This answer is later than what the other request does at once.
            assert command(server, "/is_sleeping")[0] == 200
        assert sleeping.result()[0] == 200
        status, _, answer = asked.result()
        if mode == "wait":
            assert len(answer["choices"][0]["token_ids"]) == 40
        else:
            assert (status, answer["error"]["code"]) == (503, "aborted")
        assert command(server, "/wake_up")[0] == 200
    server.wait_idle()


def test_a_request_is_aborted_by_its_id(server):
    body = {**BODY, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with (
        server.connection() as first,
        server.connection() as second,
        server.paused() as gate,
    ):
        for connection in (first, second):
            connection.request("POST", TEXT, json.dumps(body), KEY)
        server.wait_submitted(2)
        gate.hold_after(5)
        response = first.getresponse()
        event = json.loads(response.readline().removeprefix(b"data: "))
        ids = [event["id"], "cmpl-none", ""]
        assert command(server, "/abort_requests", {"request_ids": ids}) == (
            200, {"aborted": [event["id"]]}
        )  # fmt: skip
        gate.hold_after(5)
        assert b'"code":"aborted"' in response.read()
        until(lambda: server.admission.open == 1)
        number = second.getresponse().headers["x-request-id"]
        answer = command(server, "/abort_requests", {"request_ids": [number]})[1]
        assert answer == {"aborted": [number]}
    server.wait_idle()


def test_cached_prefixes_are_forgotten(server):
    def hits():
        usage = server.send("POST", TEXT, BODY, KEY)[2]["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    hits()
    assert hits() == 48
    server.wait_idle()
    freed = command(server, "/reset_prefix_cache")[1]["freed_blocks"]
    assert freed >= 3
    pool = server.engine.core.scheduler.kv_cache.pools[0]
    assert (pool.cached_blocks, pool.used_blocks) == (0, 0)
    assert hits() == 0
    assert hits() == 48


class RealServer(HashServer):
    """A server of the default model on the processor."""

    def __init__(self, **settings):
        super().__init__(**KEYS, **settings)

    def make(self):
        config = EngineConfig(
            backend="cpu", context=128, max_batch=4, max_adapters=2, max_adapter_rank=4
        )
        return make_server([("base", None)], self.config, config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two random adapters of the default model."""
    checkpoint = open_checkpoint(default_model())
    shapes = {name: np.empty(checkpoint.spec(name)[1]) for name in checkpoint.names()}
    checkpoint.close()
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(
            LoraFiles(shapes, seed=seed, targets=("q", "v"), alpha=40.0).write(
                folder / name
            )
        )
        for seed, name in enumerate(("poet", "clerk"))
    }


@pytest.mark.full
@pytest.mark.parametrize("frontends", mostly_long([2, 0]))
def test_adapters_come_and_go_and_outlast_sleep(frontends, folders):
    def names():
        data = running.send("GET", "/v1/models", None, KEY)[2]["data"]
        return [each["id"] for each in data]

    def load(name):
        return command(running, LOAD, {"lora_name": name, "lora_path": folders[name]})

    with RealServer(frontends=frontends) as running:
        base = tokens(running)
        missing = running.send("POST", TEXT, {**BODY, "model": "poet"}, KEY)
        assert missing[0] == 404
        found = {}
        for name in folders:
            assert load(name)[0] == 200
            # Each front-end knows it at once.
            for _ in range(4):
                found[name] = tokens(running, model=name)
        assert len({tuple(ids) for ids in (base, *found.values())}) == 3
        assert load("poet")[0] == 400
        text = running.send("GET", "/metrics", None, KEY)[2].decode()
        label = 'max_lora="2",model_name="base",running_lora_adapters="poet,clerk",'
        assert f'{label}waiting_lora_adapters=""' in text, text
        assert names() == ["base", "poet", "clerk"]
        assert command(running, UNLOAD, {"lora_name": "clerk"})[0] == 200
        assert names() == ["base", "poet"]
        for _ in range(4):
            gone = running.send("POST", TEXT, {**BODY, "model": "clerk"}, KEY)
            assert gone[0] == 404
        assert command(running, "/sleep")[0] == 200
        assert command(running, "/wake_up")[0] == 200
        assert names() == ["base", "poet"]
        assert tokens(running) == base
        assert tokens(running, model="poet") == found["poet"]
        assert command(running, UNLOAD, {"lora_name": "poet"})[0] == 200
        assert names() == ["base"]
    gc.collect()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sleep_frees_the_memory_of_the_model():
    weights = Path(default_model()).stat().st_size
    with RealServer() as running:
        wanted = tokens(running)
        for _ in range(2):
            awake = resident_bytes()
            assert command(running, "/sleep")[0] == 200
            freed = awake - resident_bytes()
            assert freed > 0.9 * weights, f"{freed >> 20} MB"
            assert command(running, "/wake_up")[0] == 200
            assert tokens(running) == wanted
