"""Events of the KV cache over ZeroMQ, read as subscribers of vLLM read them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from random import Random

import msgspec
import pytest
import zmq

from depth import SEED, scaled
from http_servers import HashServer
from inl.engine.records import BlocksStored
from inl.errors import RequestError
from inl.serve.kv_events import KVEventPublisher, encoded_event, next_endpoint
from inl.serve.settings import ServerConfig
from waiting import until

TEXT = "/v1/completions"
BLOCK = 16
ADDRESS = {"kv_events": "tcp://127.0.0.1:*", "kv_events_replay": "tcp://127.0.0.1:*"}


class Subscriber:
    """What a router knows of an engine's blocks; a context manager.

    It decodes plain values and knows nothing of the server's classes.
    """

    def __init__(self, publisher):
        self.tokens, self.parents = {}, {}
        self.numbers = []
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe("")
        self._live.connect(publisher.endpoint)
        self._again = self._context.socket(zmq.DEALER)
        self._again.connect(publisher.replay_endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(0)

    def again(self, first):
        """Return (number, data) of the batches from a number on."""
        self._again.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            assert self._again.poll(60_000)
            empty, number, data = self._again.recv_multipart()
            assert empty == b""
            number = int.from_bytes(number, "big", signed=True)
            if number == -1:
                assert data == b""
                return found
            found.append((number, data))

    def live(self):
        """Return (number, data) of the batches that have arrived."""
        found = []
        while self._live.poll(0):
            topic, number, data = self._live.recv_multipart()
            assert topic == b""
            found.append((int.from_bytes(number, "big"), data))
        return found

    def catch_up(self):
        for number, data in self.again(len(self.numbers)):
            assert number == len(self.numbers)
            self.numbers.append(number)
            self.apply(data)

    def apply(self, data):
        time, events, rank = msgspec.msgpack.decode(data)
        assert time > 1.6e9
        assert rank == 0
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.tokens.clear()
            elif event["type"] == "BlockRemoved":
                for key in event["block_hashes"]:
                    self.tokens.pop(key, None)
            else:
                assert event["type"] == "BlockStored"
                keys, parent = event["block_hashes"], event["parent_block_hash"]
                tokens, size = event["token_ids"], event["block_size"]
                assert (size, event["lora_name"], event["medium"]) == (
                    BLOCK, None, "GPU",
                )  # fmt: skip
                assert len(tokens) == size * len(keys)
                assert not set(keys) & set(self.tokens), "once each"
                for at, key in enumerate(keys):
                    self.tokens[key] = tokens[at * size : (at + 1) * size]
                    self.parents[key], parent = parent, key

    def prefix(self, key):
        """Return all tokens up to the end of a block."""
        found = []
        while key is not None:
            found[:0] = self.tokens[key]
            key = self.parents[key]
        return found


@contextmanager
def watched():
    """Yield a server, and a subscriber of its events."""
    with ExitStack() as stack:
        server = stack.enter_context(HashServer(max_batch=4, **ADDRESS))
        router = stack.enter_context(Subscriber(server.server.kv_events))
        yield server, router


def published(server):
    (pool,) = server.engine.core.scheduler.kv_cache.pools
    return {int.from_bytes(key[:8], "big") for key, _ in pool.published()}


def agrees(server, subscriber):
    subscriber.catch_up()
    return set(subscriber.tokens) == published(server)


def test_a_subscriber_knows_at_any_time_what_is_cached():
    draw = Random(SEED)
    prompts = [[draw.randrange(1000) for _ in range(200)] for _ in range(4)]
    with watched() as (server, router):
        for _ in range(scaled(40, 200, 2000)):
            prompt = list(draw.choice(prompts)[: draw.randrange(1, 200)])
            prompt += [draw.randrange(1000) for _ in range(draw.randrange(300))]
            body = {"prompt": prompt, "max_tokens": draw.randrange(1, 40)}
            body |= {"ignore_eos": True, "return_token_ids": True}
            status, _, answer = server.send("POST", TEXT, body)
            assert status == 200
            until(lambda: agrees(server, router))
            known = [*prompt, *answer["choices"][0]["token_ids"]]
            ends = {
                tuple(router.prefix(key))
                for key in router.tokens
                if all_there(router, key)
            }
            full = (len(prompt) - 1) // BLOCK * BLOCK
            assert not full or tuple(known[:full]) in ends
        assert len(router.numbers) > 40
        removed = len(router.parents) - len(router.tokens)
        assert removed > 0, "the cache is smaller than the prompts"
        server.engine.reset_prefix_cache()
        until(lambda: agrees(server, router))
        assert not router.tokens
        # Live messages are those that can be asked for again.
        again = dict(router.again(0))
        live = router.live()
        assert live
        assert all(again[number] == data for number, data in live)
        assert [number for number, _ in live] == sorted({n for n, _ in live})


def all_there(router, key):
    while key is not None:
        if key not in router.tokens:
            return False
        key = router.parents[key]
    return True


def test_a_subscriber_that_comes_too_late_is_logged_and_counted(monkeypatch, caplog):
    monkeypatch.setattr("inl.serve.kv_events.KEPT_BATCHES", 3)
    with watched() as (server, router):
        events = server.server.kv_events
        for number in range(8):
            before = events._kept[-1][0] if events._kept else -1
            body = {"prompt": [number] * 40, "max_tokens": 1}
            assert server.send("POST", TEXT, body)[0] == 200
            # Each in a batch of its own.
            until(lambda at=before: events._kept and events._kept[-1][0] > at)
        newest = events._kept[-1][0]
        found = [number for number, _ in router.again(0)]
        assert found == [newest - 2, newest - 1, newest]
        assert events.missed == newest - 2 > 0
        assert f"it knows nothing of {newest - 2}" in caplog.text
        text = server.send("GET", "/metrics")[2].decode()
        assert f"inl:kv_event_batches_missed_total {newest - 2}.0" in text
        # Nothing is missing of what is kept.
        router.again(newest)
        assert events.missed == newest - 2


def test_blocks_that_tokens_do_not_name_are_not_reported():
    with watched() as (server, router):
        body = {"prompt": list(range(100)), "max_tokens": 1, "cache_salt": "mine"}
        assert server.send("POST", TEXT, body)[0] == 200
        del body["cache_salt"]
        assert server.send("POST", TEXT, body)[0] == 200
        until(lambda: router.catch_up() or len(router.tokens) == 6)
        assert len(published(server)) == 12


def test_a_block_of_an_adapter_names_it():
    event = BlocksStored([b"\x01" * 32], b"\x02" * 32, [1, 2], 2, "digest")
    found = encoded_event(event, {"digest": "poet"})
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(found))
    one, two = (int.from_bytes(bytes([value]) * 8, "big") for value in (1, 2))
    assert data == {
        "type": "BlockStored",
        "block_hashes": [one],
        "parent_block_hash": two,
        "token_ids": [1, 2],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "poet",
    }


def test_addresses_of_no_use_are_refused():
    with pytest.raises(RequestError, match="ZeroMQ"):
        KVEventPublisher("nothing")
    with pytest.raises(RequestError, match="kv events"):
        ServerConfig(kv_events_replay="tcp://*:5558")
    assert next_endpoint("tcp://*:5557", 2) == "tcp://*:5559"
    assert next_endpoint("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
    assert next_endpoint(None, 2) is None
    assert next_endpoint("ipc://file", 0) == "ipc://file"
    with pytest.raises(RequestError, match="no port"):
        next_endpoint("ipc://file", 1)
