"""vllm-router and smg, unchanged, in front of two engines: ``make test-router``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from http_clients import HttpClient
from http_servers import HashServer
from waiting import until

ROUTER, SMG = os.environ.get("INL_VLLM_ROUTER"), os.environ.get("INL_SMG")
"""The commands ``vllm-router`` and ``smg``, of environments of their own."""

pytestmark = pytest.mark.long
needs_router = pytest.mark.skipif(not ROUTER, reason="INL_VLLM_ROUTER names none")
needs_smg = pytest.mark.skipif(not SMG, reason="INL_SMG names none")

JSON = {"content-type": "application/json"}
TALKS = 5  # odd, so that turns of a talk alternate between two engines
TURNS = 4
ADDRESS = {"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "tcp://127.0.0.1:*"}


class Client(HttpClient):
    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def is_healthy(self):
        try:
            return self.send("GET", "/health")[0] == 200
        except OSError:
            return False

    def hits(self):
        """Return how many requests the router has sent to cached tokens."""
        text = self.send("GET", "/metrics")[2].decode()
        name = r'vllm_router_kv_placement_lookups_total\{result="hit"\} (\d+)'
        found = re.search(name, text)
        return int(found[1]) if found else 0


def free_ports(count):
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [each.getsockname()[1] for each in opened]


@contextmanager
def routed(policy, log, program=(ROUTER,)):
    """Yield a client of a router with two engines, one of its metrics, and those."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(HashServer(max_batch=8, **ADDRESS)) for _ in range(2)
        ]
        port, metrics = free_ports(2)
        command = [*program, "--host", "127.0.0.1", "--port", port]
        command += ["--policy", policy]
        command += ["--prometheus-port", metrics]
        command += ["--worker-urls", *(each.url for each in engines)]
        if policy == "kv_aware":
            command += ["--kv-event-model", "hash", "--kv-event-block-size", "16"]
        for each in engines if policy == "kv_aware" else ():
            events = each.server.kv_events
            command += ["--kv-event-source", f"{each.url}={events.endpoint}"]
            again = f"{each.url}={events.replay_endpoint}"
            command += ["--kv-event-replay-source", again]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*map(str, command)], stdout=output, stderr=output, env=environment
            )
        try:
            client = Client(port)
            until(client.is_healthy)
            yield client, Client(metrics), engines
        finally:
            process.terminate()
            process.wait(60)


def talk(number, turn):
    text = f"Talk {number}. " * 40 + "".join(f"Turn {each}. " for each in range(turn))
    return {"model": "hash", "messages": [{"role": "user", "content": text}]} | {
        "max_tokens": 8,
        "temperature": 0,
    }


def run(client, metrics=None):
    """Return the text of each turn of all talks, and the cached tokens."""
    texts, cached = {}, 0
    for turn in range(TURNS):
        for number in range(TALKS):
            before = 0 if metrics is None else metrics.hits()
            body = talk(number, turn)
            status, _, answer = client.send("POST", "/v1/chat/completions", body, JSON)
            assert status == 200, answer
            texts[number, turn] = answer["choices"][0]["message"]["content"]
            cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            if turn and metrics is not None:
                until(lambda before=before: metrics.hits() > before)
    return texts, cached


@needs_router
def test_it_sends_conversations_to_the_engine_that_has_them(tmp_path: Path):
    path = "/v1/chat/completions"
    with HashServer(max_batch=8) as plain:
        wanted, alone = run(plain)
    with routed("round_robin", tmp_path / "log") as (client, _, engines):
        texts, by_turns = run(client)
        assert texts == wanted
        counts = [each.engine.stats.prefix_hit_tokens for each in engines]
        assert all(counts), "both are used"
    log = tmp_path / "aware"
    with routed("kv_aware", log) as (client, metrics, _):
        texts, aware = run(client, metrics)
        assert texts == wanted
        assert metrics.hits() >= (TURNS - 1) * TALKS
        with client.connection() as connection:
            body = {**talk(0, 0), "stream": True}
            data = json.dumps(body)
            connection.request("POST", path, data, JSON)
            assert b"data: [DONE]" in connection.getresponse().read()
    assert "kv_index decode" not in log.read_text(), "it understands all events"
    # By turns, the second turn of a talk finds nothing, of three that could.
    assert aware >= 0.95 * alone
    assert by_turns <= 0.75 * alone
    print(
        f"cached prompt tokens: {alone} of one engine, of two {aware} by events, "
        f"{by_turns} by turns"
    )


@needs_smg
def test_smg_sends_conversations_to_the_engine_that_has_them(tmp_path: Path):
    """By the texts that it has sent; it knows nothing of the engines' events."""
    with HashServer(max_batch=8) as plain:
        wanted, alone = run(plain)
    found = {}
    for policy in ("round_robin", "cache_aware"):
        program = SMG, "launch"
        with routed(policy, tmp_path / policy, program) as (client, _, engines):
            other = {**talk(99, 0), "max_tokens": 1}
            send = partial(client.send, "POST", "/v1/chat/completions", other, JSON)
            until(lambda send=send: send()[0] == 200)  # it has found the model
            for each in engines:
                each.engine.reset_prefix_cache()
            texts, found[policy] = run(client)
            assert texts == wanted
    assert found["cache_aware"] >= 0.95 * alone
    assert found["round_robin"] <= 0.75 * alone
