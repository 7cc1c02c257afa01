"""Several models behind one server: loaded when asked for, unloaded when idle."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest

from depth import mostly_long
from inl import EngineConfig, InferenceEngine
from inl.cli.serve_models import make_server, served_batch
from inl.device import Device
from inl.errors import CheckpointError, OutOfMemory, RequestError
from inl.serve.api_error import ApiError
from inl.serve.event_stream import encode
from inl.serve.metrics import Metrics
from inl.serve.model_slot import ModelSource
from inl.serve.models import Models
from inl.serve.settings import ServerConfig
from model_servers import ModelServer, Source
from waiting import until

PATH = "/v1/completions"


def together(*calls):
    """Return the results of calls in threads."""
    results = [None] * len(calls)

    def run(at):
        results[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    return threads, results


@pytest.mark.parametrize("frontends", mostly_long([0, 2]))
def test_each_model_is_loaded_once_by_its_first_requests(frontends):
    first, second = Source("a"), Source("b")
    second.may_open.clear()
    with ModelServer(first, second, frontends=frontends) as server:
        assert server.is_loaded() == {"a": False, "b": False}
        assert server.complete("a")[0] == 200
        threads, results = together(*[lambda: server.complete("b")] * 4)
        until(lambda: server.server.models.find("b").admission.open == 4)
        assert server.complete("a")[0] == 200, "a load does not delay loaded models"
        second.may_open.set()
        for thread in threads:
            thread.join()
        assert [status for status, _, _ in results] == [200] * 4
        assert server.is_loaded() == {"a": True, "b": True}
        assert (len(first.engines), len(second.engines)) == (1, 1)
        assert server.send("POST", PATH, {"prompt": "a", "max_tokens": 1})[0] == 200
        assert server.complete("c")[0] == 404
        lines = server.send("GET", "/metrics")[2].decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
        name = 'vllm:generation_tokens_total{{engine="0",model_name="{}"}}'
        assert float(values[name.format("a")]) == 9
        assert float(values[name.format("b")]) == 16
    until(lambda: not (first.loaded or second.loaded))


@pytest.mark.parametrize("frontends", mostly_long([0, 2]))
def test_an_idle_model_is_unloaded_and_loaded_again(frontends):
    source = Source("a", seconds=0.01)
    options = {"idle_unload": 0.2, "frontends": frontends}
    with ModelServer(source, **options) as server:
        wanted = server.complete("a")[2]["choices"][0]["token_ids"]
        until(lambda: server.is_loaded() == {"a": False})
        until(lambda: not source.loaded)
        # Its answer takes longer than the idle time.
        status, _, long = server.complete("a", max_tokens=60, ignore_eos=True)
        tokens = long["choices"][0]["token_ids"]
        assert (status, len(tokens), tokens[:4]) == (200, 60, wanted)
        assert len(source.engines) == 2


def test_a_request_does_not_use_a_model_whose_unloading_has_to_wait():
    source, other = Source("a", seconds=0.01), Source("b")
    other.may_open.clear()
    with ModelServer(source, other, idle_unload=0.1) as server:
        slots = server.server.models
        # A request keeps "a" loaded until "b" is being loaded.
        source.gate.hold_after(0)
        begun, _ = together(lambda: server.complete("a"))
        until(lambda: source.engines)
        loads, _ = together(lambda: server.complete("b"))
        assert other.opening.wait(300)
        source.gate.release()
        for thread in begun:
            thread.join()
        # Models are loaded and unloaded one at a time: "a" waits for "b".
        until(lambda: slots.find("a")._change is not None)
        source.gate.hold_after(5)
        asked, results = together(
            lambda: server.complete("a", max_tokens=60, ignore_eos=True)
        )
        until(lambda: slots.find("a").admission.open)
        server.is_loaded()  # answered later than what the request does at once
        other.may_open.set()
        until(lambda: len(source.engines) == 2)
        source.gate.release()
        for thread in (*loads, *asked):
            thread.join()
        assert results[0][0] == 200, results


def test_each_load_of_a_model_has_a_trace_of_its_own(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(
        InferenceEngine,
        "from_pretrained",
        lambda place, config, **_: opened.append((place, config.trace)),
    )
    monkeypatch.setattr("inl.cli.serve_models.resolve_model", lambda place: place)
    config = EngineConfig(backend="cpu", trace=tmp_path / "t")
    server = make_server([("a", "1"), ("b", "2")], ServerConfig(), config)
    sources = [slot._source for slot in server.models]
    for at in (0, 1, 0):
        sources[at].open(None)
    server.close()
    names = [(place, Path(trace).name) for place, trace in opened]
    assert names == [("1", "t"), ("2", "t.2"), ("1", "t.3")]


@pytest.mark.parametrize("frontends", mostly_long([0, 2]))
def test_a_failed_load_is_an_error_of_its_requests_only(frontends, caplog):
    good, bad = Source("good"), Source("bad")
    bad.error = CheckpointError("/home/someone/model: found no weights")
    bad.may_open.clear()
    with ModelServer(good, bad, frontends=frontends) as server:
        assert server.complete("good")[0] == 200
        threads, results = together(*[lambda: server.complete("bad")] * 3)
        until(lambda: server.server.models.find("bad").admission.open == 3)
        assert server.complete("good")[0] == 200
        bad.may_open.set()
        for thread in threads:
            thread.join()
        for status, _, body in results:
            assert status == 503
            assert body["error"]["code"] == "model_load_failed"
            text = body["error"]["message"]
            assert text.startswith("model: 'bad' could not be loaded: its files cannot")
            assert "someone" not in str(body)
        bad.error = None
        assert server.complete("bad")[0] == 200
    until(lambda: not bad.loaded)
    assert "bad: loading failed: /home/someone/model: found no weights" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", "/home/someone/model"),
        OutOfMemory("/home/someone/model"),
        RequestError("/home/someone/model"),
        ValueError("/home/someone/model"),
    ],
)
def test_no_error_of_a_load_shows_paths_to_clients(error, caplog):
    source = Source("a")
    source.error = error
    with ModelServer(source, Source("b")) as server:
        status, _, body = server.complete("a")
    assert (status, body["error"]["code"]) == (503, "model_load_failed")
    assert "someone" not in str(body)
    assert "someone" in caplog.text


def test_a_client_that_leaves_during_a_load_leaves_no_model_behind():
    source, other = Source("a"), Source("b")
    source.may_open.clear()
    with ModelServer(source, other, idle_unload=0.05) as server:
        with server.connection() as connection:
            connection.request("POST", PATH, b'{"model": "a", "prompt": "x"}')
            assert source.opening.wait(300)
        slot = server.server.models.find("a")
        until(lambda: slot.admission.open == 0)
        source.may_open.set()
        # Collecting what is not used stops the load for a while.
        until(lambda: source.engines and slot._change is None and slot.engine is None)
        until(lambda: not source.loaded)


def test_requests_that_wait_for_a_load_are_bounded():
    source, other = Source("a"), Source("b")
    source.may_open.clear()
    with ModelServer(source, other, max_queue=1) as server:
        threads, results = together(*[lambda: server.complete("a")] * 3)
        until(lambda: server.server.models.find("a").admission.open == 3)
        assert server.complete("a")[0] == 503
        source.may_open.set()
        for thread in threads:
            thread.join()
        assert [status for status, _, _ in results] == [200] * 3


def test_models_need_different_names():
    sources = [ModelSource("a", Source("a").open)] * 2
    with pytest.raises(RequestError, match="NAME=PATH"):
        Models(sources, ServerConfig(), Metrics(vllm_names=False), max_batch=1)


def test_names_of_models_on_the_command_line(tmp_path):
    from inl.cli.serve_models import named_models

    path = tmp_path / "x=y.gguf"
    path.touch()
    assert named_models(None, None, []) == [("smollm2-135m-instruct", None)]
    assert named_models(None, None, [str(path), "b=org/name:f.gguf"]) == [
        ("x=y.gguf", str(path)),
        ("b", "org/name:f.gguf"),
    ]
    assert named_models("m/a", "c", ["d"]) == [("c", "m/a"), ("d", "d")]


def test_names_of_models_are_text():
    """A path may have any bytes, which Python escapes and no response can have."""
    from inl.cli.serve_models import named_models

    place = "m/caf\udce9 \udcc3\udca9"
    assert named_models(place, None, []) == [("caf? ??", place)]
    place = "m/caf\udcc3\udca9"
    assert named_models(place, None, [f"b\udce9={place}"]) == [
        ("café", place), ("b?", place),
    ]  # fmt: skip
    error = ApiError(503, f"model: {place} cannot be opened")
    assert json.loads(encode(error.openai()))["error"]["message"] == (
        "model: m/caf\\udcc3\\udca9 cannot be opened"
    )


def test_a_gpu_serves_more_requests_at_the_same_time():
    assert served_batch("cpu") == served_batch(Device("reference:0")) == 32
    assert served_batch("cuda:1") == served_batch("rocm") == 256
    assert served_batch(f"worker:{sys.executable}/cuda:0") == 256
