"""``inl serve --replicas`` and ``--engine-only``, with the default model."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from pathlib import Path

import pytest

from http_servers import ServerProcess
from inl.cli.serve_fleet import fleet_mode, make_fleet
from inl.cli.serve_options import FleetOptions
from inl.config import EngineConfig
from inl.errors import InlError, RequestError
from inl.serve.settings import ServerConfig
from waiting import is_running, until

STARTS = re.compile(r"process (\d+) starts")
BODY = {"prompt": "A river is", "max_tokens": 160, "seed": 5, "temperature": 0.8}
BODY |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


def text_of(url, disturb=lambda: None):
    """Return the text of a stream and its usage; something happens after an event."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(BODY))
    text, usage = "", None
    for number, line in enumerate(connection.getresponse()):
        if line.startswith(b"data: {"):
            event = json.loads(line.removeprefix(b"data: "))
            text += "".join(each["text"] for each in event["choices"])
            usage = event.get("usage") or usage
        if number == 0:
            disturb()
    connection.close()
    return text, usage["completion_tokens"]


def get(url, path):
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=300)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return json.loads(body)


def test_a_killed_process_of_a_real_model_changes_no_text_and_is_replaced():
    with ServerProcess("--replicas", "2") as server:
        pids = [int(pid) for pid in STARTS.findall(server.log)]
        assert len(pids) == 2
        ready = lambda: [  # noqa: E731
            each["state"] == "ready" for each in get(server.url, "/load")["replicas"]
        ]
        until(lambda: all(ready()))
        wanted = text_of(server.url)
        assert wanted[1] == BODY["max_tokens"]

        killed = []

        def kill():
            loads = get(server.url, "/load")["replicas"]
            killed.extend(pid for pid, each in zip(pids, loads, strict=True)
                          if each["open"])  # fmt: skip
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

        # A busy machine may run this process again only after the last token.
        for _ in range(20):
            assert text_of(server.url, kill) == wanted
            if killed:
                break
        # The other one may have been silent meanwhile.
        assert get(server.url, "/load")["continued"] >= len(killed) == 1
        until(lambda: len(STARTS.findall(server.log)) == 3 and all(ready()))
        pids = [int(pid) for pid in STARTS.findall(server.log)]
        assert text_of(server.url) == wanted
    until(lambda: not any(map(is_running, pids)))


def test_engines_end_with_the_process_that_has_started_them():
    server = ServerProcess("--replicas", "1").__enter__()
    pids = [int(pid) for pid in STARTS.findall(server.log)]
    server.process.kill()
    with pytest.raises(AssertionError):  # its status is that of a killed one
        server.__exit__()
    until(lambda: not any(map(is_running, pids)))


def test_options_that_exclude_each_other_are_refused():
    def mode(config=None, models=(("m", "m"),), otel=False, **options):
        given, config = FleetOptions(**options), config or ServerConfig()
        others = {"--otel": otel}
        return fleet_mode(given, models, config, has_model=True, others=others)

    assert mode().value == "clients"
    assert mode(engine_only=True).value == "engine"
    assert mode(replicas=2).value == mode(replica=["a:1"]).value == "fleet"
    for config, models, options in [
        (None, [("m", "m")], {"engine_only": True, "replicas": 2}),
        (None, [("m", "m"), ("n", "n")], {"replicas": 2}),
        (ServerConfig(frontends=2), [("m", "m")], {"replica": ["a:1"]}),
        (ServerConfig(idle_unload=5), [("m", "m")], {"engine_only": True}),
        (None, [("m", "m")], {"replicas": 2, "otel": True}),
        (None, [("m", "m")], {"replica": ["a:1"], "replica_file": Path("engines")}),
    ]:
        with pytest.raises(RequestError, match="accepts one"):
            mode(config, models, **options)


@pytest.mark.parametrize(
    ("options", "config", "reason"),
    [
        ({"place": "ray:"}, {}, "found no --replicas"),
        ({"place": "worker:", "replicas": 2}, {}, "--place worker: is not supported"),
        ({"place": "join:", "replicas": 2}, {}, "serves none"),
        ({"place": "nowhere:", "replicas": 2}, {}, "PLACE: or PLACE:TARGET/"),
        ({"place": "nowhere:host", "replicas": 2}, {}, "the place 'nowhere'"),
        ({"replica_file": Path("/nowhere/engines")}, {}, "a file with HOST:PORT"),
    ],
)
def test_engines_that_cannot_be_are_refused(options, config, reason):
    given, config = FleetOptions(**options), ServerConfig(**config)
    models = [("m", "m")]

    def make():
        fleet_mode(given, models, config, has_model=True, others={})
        return make_fleet(given, models, config, EngineConfig(), "m", "m")

    with pytest.raises(InlError, match=re.escape(reason)):
        make()
