"""Many streams while engines and front-ends are killed, stopped, cut off and rolled.

At long depth each test takes ``INL_CHAOS_SECONDS``, by default 600; the real model is
the default one, or ``INL_CHAOS_MODEL``:

    INL_TEST_DEPTH=long pytest -s tests/fleet/test_chaos.py
    INL_TEST_DEPTH=long INL_CHAOS_SECONDS=90 pytest -s tests/fleet/test_chaos.py -k real

Printed are the streams, what front-ends have counted, and the seconds of each kind of
disturbance: from the loss to its noticing by a front-end, from there to the next token,
and what a client sees of both.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random

import pytest

from depth import SEED, scaled
from fleets import EngineProcess, FrontEndProcess, Proxy
from http_servers import HashServer
from resuming_clients import Pauses, whole_stream
from stream_requests import REQUESTS, TEXT, joined
from waiting import until

SLOW = {"max_batch": 16, "seconds": 0.01}
SERVER = {"keep_alive_seconds": 0.5, "drain_seconds": 1}

SECONDS = float(os.environ.get("INL_CHAOS_SECONDS", 600))
MODEL = os.environ.get("INL_CHAOS_MODEL")

NOTICED, CONTINUED = "noticed", "continued after that"

ACTS = (
    "kill an engine", "kill a front-end", "stop a front-end", "cut off half",
    "stop an engine", "roll an engine", "roll a front-end", "kill all front-ends",
    "kill an engine and a front-end",
)  # fmt: skip

KINDS = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9},
    {"presence_penalty": 0.4, "logprobs": 1},
    {"n": 2},
    {"min_tokens": 50, "ignore_eos": False},
)
NAMED = {"schema": "seed", "tools": "seed", "messages": "max_tokens"}
NAMED |= {"responses": "max_output_tokens"}
"""Requests of other dialects, and the field by which they differ."""


def request_of(number, named=tuple(NAMED)):
    """Return path and body of a request."""
    kind = number % (len(KINDS) + len(named))
    if kind >= len(KINDS):
        name = named[kind - len(KINDS)]
        path, body = REQUESTS[name]
        return path, {**body, NAMED[name]: 50 + number % 1000}
    draw = Random(number)
    prompt = [*range(64), *(draw.randrange(1000) for _ in range(draw.randrange(1, 90)))]
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "seed": number}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    return TEXT, body | KINDS[kind]


def said(events):
    """Return what the events of a whole stream say, each of which came once."""
    numbers = [number for number, _ in events]
    assert len(set(numbers)) == len(numbers)
    return joined([f"data: {data}" for _, data in events])


def check_structure(body, events):
    """Fail if an output that has ended is not what its schema says."""
    if "response_format" not in body:
        return
    datas = [json.loads(data) for _, data in events if data != "[DONE]"]
    (*_, last) = (each for data in datas for each in data["choices"])
    if last["finish_reason"] == "stop":
        text = "".join(
            each["delta"].get("content") or ""
            for data in datas
            for each in data["choices"]
        )
        assert len(json.loads(text)["city"]) >= 60


class Engine:
    """An engine behind a network, which is started again if it ends."""

    def __init__(self, stack, options):
        self._stack, self._options = stack, options
        self.process = stack.enter_context(EngineProcess(**options))
        self.address = self.process.address
        self.proxy = stack.enter_context(Proxy(self.address))

    def start(self):
        options = {**self._options, "address": self.address}
        self.process = self._stack.enter_context(EngineProcess(**options))
        assert self.process.address == self.address


class FrontEnd:
    """A front-end, which is started again at its address if it ends."""

    def __init__(self, stack, engines):
        addresses = [each.proxy.address for each in engines]
        self._stack, self._options = stack, {"engines": addresses, "server": SERVER}
        self.process = stack.enter_context(FrontEndProcess(**self._options))
        self.address, self.url = self.process.address, self.process.url

    def start(self):
        options = {**self._options, "address": self.address}
        self.process = self._stack.enter_context(FrontEndProcess(**options))
        assert self.process.address == self.address

    def load(self):
        return self.process.send("GET", "/load")[2]

    def states(self):
        return [each["state"] for each in self.load()["replicas"]]

    def count(self, name):
        """Return a total of its metrics."""
        text = self.process.send("GET", "/metrics")[2].decode()
        return float(re.search(rf"^inl:{name}_total\{{.*\}} (\S+)$", text, re.M)[1])


class Fleet:
    """Engines and front-ends, and what happens to them."""

    def __init__(self, stack, engines, front_ends, options, draw):
        self.engines = [Engine(stack, options) for _ in range(engines)]
        self.front_ends = [FrontEnd(stack, self.engines) for _ in range(front_ends)]
        self.urls = [each.url for each in self.front_ends]
        self.ended = threading.Semaphore(0)
        """Counts streams."""
        self.times = Pauses()
        self._continued = set()
        """Times of front-ends that were noted."""
        names = "lost", "continued", "resumed", "diverged", "failed", "prefix_gaps"
        self.counts = {f"fleet_{name}": 0 for name in names}
        self._draw = draw

    def until_ready(self):
        for each in self.front_ends:
            until(lambda each=each: set(each.states()) == {"ready"})

    def until_idle(self):
        """Wait until nothing takes a place, and count what has happened."""
        for each in self.front_ends:
            until(lambda each=each: is_idle(each.load()))
            self._count(each)

    def _count(self, front_end):
        self._note_continued(front_end)
        for name in self.counts:
            self.counts[name] += front_end.count(name)

    def _note_continued(self, front_end):
        """Note the times of completions that went on since the last call."""
        for seconds in front_end.load()["continue_seconds"]:
            if (front_end, seconds) not in self._continued:
                self._continued.add((front_end, seconds))
                self.times.note(CONTINUED, seconds)

    def _until_lost(self, engines, began):
        """Wait until all front-ends have noticed, and note when they did."""
        for each, engine in itertools.product(self.front_ends, engines):
            at = self.engines.index(engine)
            found = []

            def is_lost(each=each, at=at, found=found):
                before = time.monotonic()
                row = each.load()["replicas"][at]
                middle = (before + time.monotonic()) / 2
                found[:] = [middle - row["state_seconds"] - began]
                return row["state"] != "ready"

            until(is_lost)
            if found[0] > 0:  # it was not lost before, on a busy machine
                self.times.note(NOTICED, found[0])

    def until_streams_end(self, count):
        """Wait until so many streams end from now on."""
        while self.ended.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self.ended.acquire(timeout=300), "no stream ends"

    def _busy(self):
        """Return an engine and a front-end that have open requests."""
        while True:
            loads = [each.load() for each in self.front_ends]
            rows = zip(*(load["replicas"] for load in loads), strict=True)
            busy = [any(each["open"] for each in row) for row in rows]
            found = list(itertools.compress(self.engines, busy))
            using = [each["server_load"] for each in loads]
            used = list(itertools.compress(self.front_ends, using))
            if found and used:
                return self._draw.choice(found), self._draw.choice(used)
            self.until_streams_end(1)

    def disturb(self, act):
        """Do one of ``ACTS``, and wait until all is well again."""
        engine, front_end = self._busy()
        self.times.act, began = act, time.monotonic()
        match act:
            case "kill an engine":
                engine.process.kill()
                self._until_lost([engine], began)
                engine.start()
            case "stop an engine":
                engine.process.stop()
                self._until_lost([engine], began)
                engine.process.go_on()
            case "roll an engine":
                engine.process.terminate()
                assert engine.process.process.wait(300) == 0
                engine.start()
            case "cut off half":
                half = self._draw.sample(self.engines, len(self.engines) // 2)
                for each in half:
                    each.proxy.partition()
                self._until_lost(half, began)
                self.until_streams_end(2)
                for each in half:
                    each.proxy.heal()
            case "kill a front-end":
                self._count(front_end)
                front_end.process.kill()
                self.until_streams_end(2)
                front_end.start()
            case "stop a front-end":
                front_end.process.stop()
                self.until_streams_end(2)
                front_end.process.go_on()
            case "roll a front-end":
                self._count(front_end)
                front_end.process.terminate()
                assert front_end.process.process.wait(300) == 0
                front_end.start()
            case "kill all front-ends":
                for each in self.front_ends:
                    self._count(each)
                    each.process.kill()
                for each in self.front_ends:
                    each.start()
            case "kill an engine and a front-end":
                self._count(front_end)
                engine.process.kill()
                front_end.process.kill()
                engine.start()
                front_end.start()
            case _:
                raise AssertionError(act)
        self.until_ready()
        self.until_streams_end(1)
        for each in self.front_ends:
            self._note_continued(each)


def is_idle(load):
    """Whether no request is open, at any engine."""
    return not load["server_load"] and not any(e["open"] for e in load["replicas"])


def check(fleet, requests, wanted, clients, acts):
    """Ask for streams until everything has happened, and each of them at least once."""
    over, counts, began = threading.Event(), [0] * clients, time.monotonic()

    def ask_all(first):
        draw, count = Random(f"{SEED} {first}"), len(requests)
        for number in itertools.count(first, clients):
            if over.is_set() and number >= count:
                return
            path, body = requests[number % count]
            events = whole_stream(fleet.urls, path, body, draw, fleet.times)
            assert said(events) == wanted[number % count], number
            check_structure(body, events)
            counts[first] += 1
            fleet.ended.release()

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(ask_all, first) for first in range(clients)]
        try:
            for act in acts:
                fleet.disturb(act)
        finally:
            over.set()
        for each in asked:
            each.result()
    fleet.until_idle()
    found = ", ".join(f"{name} {count:g}" for name, count in fleet.counts.items())
    print(
        f"\n{sum(counts)} streams of {len(requests)} requests in "
        f"{time.monotonic() - began:.0f} s, each as the undisturbed one: tokens, "
        f"texts, structures, usage, every event once; none failed\n{found}\n"
        f"{fleet.times}\nload {os.getloadavg()[0]:.1f}, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    assert fleet.counts["fleet_continued"], "engines were disturbed"
    assert fleet.counts["fleet_resumed"], "front-ends were disturbed"
    assert not fleet.counts["fleet_diverged"]
    assert not fleet.counts["fleet_failed"]


def repeated(draw, seconds):
    """Yield acts, each once, and then in another order each time, for some time."""
    end = time.monotonic() + seconds
    yield from ACTS
    while time.monotonic() < end:
        for act in draw.sample(ACTS, len(ACTS)):
            if time.monotonic() < end:
                yield act


@pytest.mark.timeout(3600)
def test_every_stream_is_the_undisturbed_one_whatever_happens():
    streams, clients, engines, front_ends = scaled(
        (12, 4, 2, 2), (32, 8, 3, 2), (1000, 32, 4, 3)
    )
    draw = Random(SEED)
    acts = scaled(ACTS[:4], ACTS, repeated(draw, SECONDS))
    named = scaled(("schema",), tuple(NAMED))
    requests = [request_of(number, named) for number in range(streams)]
    with HashServer(max_batch=8) as plain:
        wanted = [undisturbed(plain, *each) for each in requests]
    with ExitStack() as stack:
        fleet = Fleet(stack, engines, front_ends, SLOW, draw)
        fleet.until_ready()
        check(fleet, requests, wanted, clients, acts)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_stream_of_a_real_model_is_the_undisturbed_one():
    # Streams beside others are equal to the last bit.
    options = {"is_real": True, "max_batch": 8, "config": {"invariant": True}}
    options["model"] = MODEL
    requests = [real_request(number) for number in range(6)]
    with ExitStack() as stack:
        draw = Random(SEED)
        fleet = Fleet(stack, 2, 2, options, draw)
        fleet.until_ready()
        wanted = [undisturbed(fleet.front_ends[0].process, *each) for each in requests]
        check(fleet, requests, wanted, 3, repeated(draw, SECONDS))


def real_request(number):
    path, body = request_of(number, ("schema",))
    if "prompt" in body:
        body["prompt"] = f"Story {number}. Once upon a time"
    return path, {**body, "max_tokens": 40, "min_tokens": 0}


def undisturbed(server, path, body):
    """Return what a stream says of which nothing happens to the server."""
    status, _, text = server.send("POST", path, {**body, "stream": True})
    assert status == 200, text
    return joined(text.decode().splitlines())
