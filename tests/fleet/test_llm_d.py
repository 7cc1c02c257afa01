"""What llm-d and Dynamo read of an engine: events, metrics and the health endpoint.

The readers here follow the rules of their sources, of November 2026, and nothing of
the server's classes:

- llm-d-router, ``pkg/kvevents``: topics are ``kv@ENGINE@MODEL``; batches are arrays of
  a time, events and maybe a rank; events are arrays or maps with a ``type``; batches
  that are asked for again have their topic, and come without a gap;
- llm-d-router and Gateway API Inference Extension, the metrics of ``vllm``;
- Dynamo, ``lib/kv-router``: the topic is not read; of what is asked for again the
  second of three frames is the number.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from http_servers import HashServer
from inl.cli.serve_fleet import make_fleet
from inl.cli.serve_options import FleetOptions
from inl.config import EngineConfig
from inl.errors import RequestError
from inl.serve.collectors import PREFIX
from inl.serve.metrics import Metrics
from inl.serve.settings import ServerConfig
from waiting import until

TEXT = "/v1/completions"
BLOCK = 16
MODEL = "hash"
EVENTS = {"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "tcp://127.0.0.1:*"}
LONGEST_HASH = 64

STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)  # fmt: skip
REMOVED = "block_hashes", "medium", "group_idx"
FIELDS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}


def event_of(found):
    """Return type and fields of an event, in either of its forms."""
    if isinstance(found, list):
        kind, *values = found
        return kind, dict(zip(FIELDS[kind], values, strict=False))
    kind = found["type"]
    return kind, {name: found.get(name) for name in FIELDS[kind]}


def hash_of(found):
    """Return the 64 bits by which a router knows a block."""
    if isinstance(found, bytes):
        assert 0 < len(found) <= LONGEST_HASH
        return int.from_bytes(found[-8:], "big")
    assert type(found) is int
    assert -(1 << 63) <= found < 1 << 64
    return found % (1 << 64)


class Reader:
    """Subscribes to one engine, and asks for what it has missed; a context manager."""

    topic = ""
    """Topics that it wants."""

    def __init__(self, publisher):
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.connect(publisher.endpoint)
        self._live.subscribe(self.topic)
        self._again = self._context.socket(zmq.DEALER)
        self._again.connect(publisher.replay_endpoint)
        self.last = -1
        self.blocks = {}
        """Tokens and hash before each block, by hash."""
        self.adapters, self.media, self.ranks = set(), set(), set()
        self.name = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(0)

    def catch_up(self):
        """Ask for all that comes after the last batch."""
        self._again.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            assert self._again.poll(60_000)
            found = self.replayed(self._again.recv_multipart())
            if found is None:
                return
            number, data = found
            assert number == self.last + 1, "without a gap"
            self.last = number
            self.apply(data)

    def read_live(self):
        """Apply what has arrived and is new."""
        while self._live.poll(0):
            number, data = self.told(self._live.recv_multipart())
            if number == self.last + 1:
                self.last = number
                self.apply(data)

    def apply(self, data):
        found = msgspec.msgpack.decode(data)
        assert isinstance(found, list)
        assert 2 <= len(found) <= 3
        assert isinstance(found[0], float)
        self.ranks.add(found[2])
        for kind, event in map(event_of, found[1]):
            if kind == "AllBlocksCleared":
                self.blocks.clear()
                continue
            hashes = [hash_of(each) for each in event["block_hashes"]]
            if kind == "BlockRemoved":
                for key in hashes:
                    self.blocks.pop(key, None)
                continue
            tokens, size = event["token_ids"], event["block_size"]
            assert len(tokens) == size * len(hashes)
            before = event["parent_block_hash"]
            before = 0 if before is None else hash_of(before)
            for at, key in enumerate(hashes):
                self.blocks[key] = tokens[at * size : (at + 1) * size], before
                before = key
            self.adapters.add(event["lora_name"])
            self.media.add((event["medium"] or "gpu").lower())

    def cached_blocks(self, prompt):
        """Return how many leading blocks of a prompt the engine has."""
        next_of = {(before, tuple(own)): key for key, (own, before) in
                   self.blocks.items()}  # fmt: skip
        before = count = 0
        while True:
            own = tuple(prompt[count * BLOCK : (count + 1) * BLOCK])
            if (found := next_of.get((before, own))) is None:
                return count
            before, count = found, count + 1


class LlmD(Reader):
    topic = "kv@"

    def told(self, frames):
        topic, number, data = frames
        assert len(number) >= 8
        kind, self.name, model = topic.decode().split("@")
        assert (kind, model) == ("kv", MODEL)
        return int.from_bytes(number[:8], "big"), data

    def replayed(self, frames):
        if not frames[0]:
            frames = frames[1:]
        if len(frames) == 3 and not frames[2]:
            return None
        return self.told(frames)


class Dynamo(Reader):
    def told(self, frames):
        _, number, data = frames
        assert len(number) == 8
        return int.from_bytes(number, "big"), data

    def replayed(self, frames):
        assert len(frames) >= 3
        return None if not frames[2] else self.told(frames[:3])


@pytest.mark.parametrize("kind", [LlmD, Dynamo])
def test_a_router_knows_which_engine_has_most_of_a_prompt(kind):
    topics = ["kv@one@hash", "kv@two@hash"] if kind is LlmD else ["", ""]
    long = list(range(10 * BLOCK))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(HashServer(kv_events_topic=each, **EVENTS))
            for each in topics
        ]
        readers = [
            stack.enter_context(kind(server.server.kv_events)) for server in servers
        ]

        def ask(server, prompt):
            body = {"prompt": prompt, "max_tokens": 1}
            assert server.send("POST", TEXT, body)[0] == 200

        def knows(wanted):
            for each in readers:
                each.catch_up()
            return [each.cached_blocks(long) for each in readers] == wanted

        ask(servers[0], long[: 4 * BLOCK + 1])
        ask(servers[1], long[: 2 * BLOCK] + [999] * BLOCK)
        until(lambda: knows([4, 2]))
        ask(servers[1], [*long, 1])
        until(lambda: knows([4, 10]))

        def is_told():
            readers[0].read_live()
            return readers[0].cached_blocks(long) == 6

        ask(servers[0], [*long[: 6 * BLOCK], 1])
        until(is_told)  # by the subscription alone
        servers[1].engine.reset_prefix_cache()
        until(lambda: knows([6, 0]))
        for each in readers:
            assert each.adapters == {None}
            assert each.media == {"gpu"}
            assert each.ranks == {0}
        if kind is LlmD:
            assert [each.name for each in readers] == ["one", "two"]


def engine_configs(**settings):
    """Return the settings of the engines of ``--replicas 2``, as they read them."""
    options = FleetOptions(replicas=2)
    fleet = make_fleet(
        options, [("m", "m")], ServerConfig(**settings), EngineConfig(backend="cpu"),
        "m", "m",
    )  # fmt: skip
    found = [each.settings["server"] for each in fleet._local._engines.values()]
    for each in fleet._local._engines.values():
        each.listening.close()
    return found


@pytest.mark.parametrize("topic", ["kv@pod@hash", "kv@pod-{rank}@hash"])
def test_a_router_tells_the_engines_of_a_server_apart(topic):
    """By rank, as those of vLLM's data parallelism, and by topics that have it."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(HashServer(**each))
            for each in engine_configs(
                kv_events="tcp://*:0",
                kv_events_replay="tcp://*:0",
                kv_events_topic=topic,
            )
        ]
        readers = [stack.enter_context(LlmD(each.server.kv_events)) for each in servers]
        for server, blocks in zip(servers, (4, 2), strict=True):
            body = {"prompt": list(range(blocks * BLOCK + 1)), "max_tokens": 1}
            assert server.send("POST", TEXT, body)[0] == 200

        def known():
            for each in readers:
                each.catch_up()
            # One index of both, by topic and rank as llm-d has it.
            index = {}
            for each in readers:
                for rank in each.ranks:
                    index.setdefault((each.name, rank), set()).update(each.blocks)
            return {key: len(blocks) for key, blocks in index.items()}

        names = [topic.split("@")[1].replace("{rank}", each) for each in "01"]
        until(lambda: known() == {(names[0], 0): 4, (names[1], 1): 2})


def test_engines_of_a_server_share_no_port():
    found = engine_configs(
        kv_events="tcp://*:5557", kv_events_replay="tcp://*:5559", kv_events_topic="t"
    )
    assert [(e["kv_events"], e["kv_events_replay"]) for e in found] == [
        ("tcp://*:5557", "tcp://*:5559"), ("tcp://*:5558", "tcp://*:5560"),
    ]  # fmt: skip
    with pytest.raises(RequestError, match="2 apart"):
        engine_configs(kv_events="tcp://*:5557", kv_events_replay="tcp://*:5558")


def gauges(text, name):
    """Return labels and value of each gauge of a name."""
    for family in text_string_to_metric_families(text):
        if family.name == name:
            assert family.type == "gauge"
            return [(each.labels, each.value) for each in family.samples]
    raise AssertionError(f"no {name}")


def adapters_of(text):
    """Return what the newest of the gauges says of adapters that are there."""
    found = gauges(text, "vllm:lora_requests_info")
    known = [
        (value, labels)
        for labels, value in found
        if labels["running_lora_adapters"] or labels["waiting_lora_adapters"]
    ]
    if not known:
        return [], int(found[0][0]["max_lora"])
    _, labels = max(known, key=lambda each: each[0])
    return labels["running_lora_adapters"].split(","), int(labels["max_lora"])


def test_a_router_reads_load_and_cache_from_the_metrics():
    with HashServer(max_batch=4) as server:
        assert server.send("GET", "/health")[0] == 200
        body = {"prompt": list(range(100)), "max_tokens": 1}
        assert server.send("POST", TEXT, body)[0] == 200
        text = server.send("GET", "/metrics")[2].decode()
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        ((labels, value),) = gauges(text, f"vllm:{name}")
        assert labels["model_name"] == MODEL
        assert 0 <= value <= 1
    ((labels, value),) = gauges(text, "vllm:cache_config_info")
    assert (value, int(labels["block_size"])) == (1, BLOCK)
    limits = server.engine.runner.limits
    assert int(labels["num_gpu_blocks"]) == sum(limits.blocks)
    assert "lora_requests_info" not in text, "an engine without room for adapters"


def test_a_router_reads_which_adapters_are_there():
    metrics = Metrics(vllm_names=True)
    named = ["poet", "clerk"]
    room = [0]
    metrics.adapters.add({"model_name": "m"}, lambda: (0, ()))
    metrics.adapters.add({"model_name": "n"}, lambda: (room[0], named))
    assert b"lora_requests_info" not in metrics.text()
    room[0] = 3
    text = metrics.text().decode()
    assert adapters_of(text) == (named, 3)
    ((_, value),) = gauges(text, f"{PREFIX}lora_requests_info")
    assert abs(value - time.time()) < 600
    named.clear()
    assert adapters_of(metrics.text().decode()) == ([], 3)


def test_a_topic_needs_events():
    with pytest.raises(RequestError, match="kv events topic"):
        ServerConfig(kv_events_topic="kv@one@hash")
