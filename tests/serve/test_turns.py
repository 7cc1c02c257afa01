"""Work of many connections is spread over passes of the event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest

pytest.importorskip("uvicorn")
import uvicorn
from uvicorn.server import ServerState

from inl.serve import connections as module
from inl.serve.connections import Connection, Connections
from inl.serve.settings import ServerConfig
from inl.serve.turns import CALL_COST, PASS_COST, Turns

CLIENTS = 1_000
REQUEST = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
LONG = b"POST /x HTTP/1.1\r\ncontent-length: 20000\r\n\r\n" + b"x" * 20_000
CHUNKED = b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """Records what a connection does with its socket."""

    def __init__(self):
        super().__init__()
        self.written, self.is_paused, self.has_ended = b"", False, False

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False

    def write(self, data):
        self.written += data

    def write_eof(self):
        pass

    def can_write_eof(self):
        return True

    def is_closing(self):
        return self.has_ended

    def close(self):
        self.has_ended = True

    abort = close


async def answer(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def refuse(scope, receive, send):
    await send({"type": "http.response.start", "status": 401, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Passes:
    """Counts passes of the running loop until :meth:`stop`."""

    def __init__(self):
        self.number, self._runs = 0, True
        self._next()

    def _next(self):
        self.number += 1
        if self._runs:
            asyncio.get_running_loop().call_soon(self._next)

    def stop(self):
        self._runs = False


def connected(app, count=CLIENTS):
    """Return connections of one server, and their transports."""
    config = ServerConfig(port=0, receive_seconds=300.0)
    options = {
        "config": uvicorn.Config(app, lifespan="off"),
        "server_state": ServerState(),
        "app_state": {},
    }
    options["config"].load()
    all_of_them = Connections(config, count)
    made = [Connection(all_of_them, **options) for _ in range(count)]
    transports = [Transport() for _ in made]
    for connection, transport in zip(made, transports, strict=True):
        connection.connection_made(transport)
    return made, transports


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 300))


@pytest.mark.parametrize("data", [REQUEST, LONG], ids=["short", "long"])
def test_requests_that_arrive_together_are_parsed_over_many_passes(data, monkeypatch):
    parsed = Counter()

    async def test():
        made, transports = connected(answer)
        passes = Passes()
        parse = Connection._parse

        def counted(self, data):
            parsed[passes.number] += len(data) + CALL_COST
            parse(self, data)

        monkeypatch.setattr(Connection, "_parse", counted)
        for each in made:
            each.data_received(data)
        await until(lambda: all(each.written for each in transports))
        passes.stop()
        assert all(b" 200 OK\r\n" in each.written for each in transports)

    run(test)
    assert max(parsed.values()) <= PASS_COST + module.PARSED_BYTES + CALL_COST
    assert len(parsed) > CLIENTS * CALL_COST / PASS_COST / 2


def test_what_is_dropped_is_read_over_many_passes(monkeypatch):
    """A refused message that goes on: each read is a copy of what has arrived."""
    monkeypatch.setattr(module, "MAX_DRAINING", CLIENTS)

    async def test():
        made, transports = connected(refuse)
        for each in made:
            each.data_received(CHUNKED)
        await until(lambda: all(each._is_draining for each in made))
        for each in made:
            each.data_received(b"1\r\nx\r\n" * 10_000)
        assert all(each.is_paused for each in transports)
        resumed = []
        while any(each.is_paused for each in transports):
            before = sum(each.is_paused for each in transports)
            await asyncio.sleep(0)
            resumed.append(before - sum(each.is_paused for each in transports))
        assert max(resumed) < 20
        for _ in range(5):
            made[0].data_received(b"x" * 60_000)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert transports[0].is_paused  # nothing more is read

    run(test)


def test_clients_that_leave_together_end_over_many_passes():
    ended = Counter()

    async def test():
        made, _ = connected(wait)
        for each in made:
            each.data_received(REQUEST)
        await until(lambda: all(each.cycle is not None for each in made))
        for _ in range(5):
            await asyncio.sleep(0)
        passes.append(Passes())
        for each in made:
            each.connection_lost(None)
        await until(lambda: sum(ended.values()) == CLIENTS)
        passes[0].stop()

    async def wait(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass
        ended[passes[0].number] += 1

    passes = []
    run(test)
    assert max(ended.values()) <= 2 * PASS_COST / CALL_COST


def test_late_heads_are_refused_over_many_passes():
    async def test():
        made, transports = connected(answer)
        for each in made:
            each.data_received(REQUEST[:-2])
        await until(lambda: not made[0]._turns._urgent)
        for each in made:
            each._head_is_late()
        answered = [0]
        while answered[-1] < CLIENTS:
            answered.append(sum(b" 408 " in each.written for each in transports))
            await asyncio.sleep(0)
        steps = [b - a for a, b in pairwise(answered)]
        assert max(steps) <= PASS_COST / CALL_COST

    run(test)


def test_a_head_that_arrived_in_time_and_waits_for_its_turn_is_not_late():
    async def test():
        made, transports = connected(answer, 1)
        made[0].data_received(REQUEST[:-2])
        made[0]._turns.takes(PASS_COST)
        made[0].data_received(REQUEST[-2:])
        made[0]._head_is_late()
        await until(lambda: transports[0].written)
        assert b" 200 OK\r\n" in transports[0].written

    run(test)


def test_long_bodies_go_on_beside_urgent_work_and_behind_it():
    done = []

    async def test():
        turns = Turns()
        turns.takes(PASS_COST)
        assert not turns.takes(1)
        for at in range(200):
            turns.add(lambda at=at: done.append(("urgent", at)) or 100)
        for at in range(3):
            turns.add(
                lambda at=at: done.append(("part", at)) or PASS_COST // 2,
                is_urgent=False,
            )
        assert not done
        await until(lambda: len(done) == 203)

    run(test)
    for kind in ("urgent", "part"):
        numbers = [at for name, at in done if name == kind]
        assert numbers == sorted(numbers)
    first = [done.index(("part", at)) for at in range(3)]
    assert first[0] == 0
    assert all(b - a > 4 for a, b in pairwise(first))


def test_an_error_of_one_leaves_the_others():
    done = []

    async def test():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: done.append(context["exception"]))
        turns = Turns()
        turns.add(lambda: 1 // 0)
        turns.add(lambda: done.append("next") or 0)
        await until(lambda: len(done) == 2)

    run(test)
    assert isinstance(done[0], ZeroDivisionError)
    assert done[1] == "next"
