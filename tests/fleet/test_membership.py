"""Engines that operators add, drain, remove and replace while streams are open."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from fleets import (
    FOLDER,
    LONG,
    SLOW,
    TEXT,
    EngineProcess,
    Fleet,
    HeldEngine,
    answered,
    ids_of,
)
from http_servers import HashServer
from inl.cli.fleet_api import FleetApi
from inl.cli.fleet_roll import Roll
from inl.cli.main import main
from inl.errors import RequestError
from inl.fleet.local_engines import LocalEngines
from inl.fleet.replica_file import ReplicaFile
from waiting import until

KEYS = {"admin_keys": ("operator",)}
ADMIN = {"authorization": "Bearer operator"}
WAIT = 300.0


@pytest.fixture(scope="module")
def plain():
    with HashServer(max_batch=8) as server:
        yield server


@pytest.fixture(scope="module")
def engines():
    with HeldEngine(max_batch=8) as one, HeldEngine(max_batch=8) as two:
        yield [one, two]


def rows(fleet):
    """Return what the server knows of each engine, by its address."""
    status, _, found = fleet.send("GET", "/fleet", None, ADMIN)
    assert status == 200, found
    return {each["address"]: each for each in found["replicas"]}


def change(fleet, action, **fields):
    """Return the status and the body of a change."""
    status, _, found = fleet.send("POST", f"/fleet/{action}", fields, ADMIN)
    return status, found


def until_state(fleet, address, state):
    until(lambda: rows(fleet).get(address, {}).get("state") == state)


def addresses_of(engines):
    return [each.address for each in engines]


def until_ready(fleet, addresses):
    for address in addresses:
        until_state(fleet, address, "ready")


@contextmanager
def held_stream(fleet, engines):
    """Yield the engine that holds a stream after some tokens, and the other one.

    The stream goes on at the end; its tokens are those of an undisturbed one.
    """
    for each in engines:
        each.gate.hold_after(12)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(lambda: ids_of(list(fleet.stream(TEXT, LONG))))
        try:
            until(lambda: any(each.gate.is_held.is_set() for each in engines))
            engines = sorted(engines, key=lambda each: not each.gate.is_held.is_set())
            for each in engines[1:]:
                each.gate.release()
            yield [*engines, stream]
        finally:
            for each in engines:
                each.gate.release()


def test_a_drained_engine_finishes_its_requests_and_gets_no_others(plain, engines):
    addresses, wanted = addresses_of(engines), answered(plain)
    with Fleet(addresses, config=KEYS) as fleet:
        until_ready(fleet, addresses)
        places = fleet.client.admission.max_running
        with held_stream(fleet, engines) as (busy, other, stream):
            status, row = change(fleet, "drain", address=busy.address)
            assert (status, row["state"], row["scope"]) == (200, "draining", "server")
            assert row["reason"] == "is drained by an operator"
            assert fleet.client.admission.max_running == places / 2
            for _ in range(3):
                assert answered(fleet) == wanted
            assert rows(fleet)[busy.address]["open"] == 1
            status, found = change(fleet, "drain", address=other.address)
            assert (status, found["error"]["code"]) == (409, "last_engine")
            busy.gate.release()
            assert stream.result(WAIT) == wanted
        assert not fleet.counts["continued"]
        assert change(fleet, "add", address=busy.address)[1]["state"] == "ready"
        assert fleet.client.admission.max_running == places


def test_what_a_drained_engine_does_not_finish_in_time_goes_on(plain, engines):
    addresses = addresses_of(engines)
    with Fleet(addresses, config=KEYS) as fleet:
        until_ready(fleet, addresses)
        with held_stream(fleet, engines) as (busy, _, stream):
            assert change(fleet, "drain", address=busy.address, seconds=0)[0] == 200
            assert stream.result(WAIT) == answered(plain)
        assert fleet.counts["continued"] == 1
        assert not fleet.counts["lost"]


def test_a_removed_engine_leaves_once_it_has_finished(plain, engines):
    addresses, wanted = addresses_of(engines), answered(plain)
    with Fleet(addresses[:1], config=KEYS) as fleet:
        until_ready(fleet, addresses[:1])
        with held_stream(fleet, engines[:1]) as (busy, stream):
            assert change(fleet, "remove", address=busy.address)[0] == 409
            assert change(fleet, "add", address=addresses[1])[0] == 200
            until_ready(fleet, addresses[1:])
            status, row = change(fleet, "remove", address=busy.address)
            assert (status, row["open"], row["is_leaving"]) == (200, 1, True)
            assert answered(fleet) == wanted
            assert [*rows(fleet)] == addresses
            busy.gate.release()
            assert stream.result(WAIT) == wanted
        until(lambda: [*rows(fleet)] == addresses[1:])
        assert not fleet.counts["continued"]
        assert not fleet.counts["lost"]
        assert [each.address for each in fleet.client.engines] == addresses[1:]
        assert change(fleet, "add", address=addresses[0])[0] == 200
        until_ready(fleet, addresses)


def test_changes_need_an_admin_key_and_fields(engines):
    (address, _) = addresses_of(engines)
    with Fleet([address], config={**KEYS, "api_keys": ("user",)}) as fleet:
        until_ready(fleet, [address])
        for headers in ({}, {"authorization": "Bearer user"}):
            assert fleet.send("GET", "/fleet", None, headers)[0] == 401
            for action in ("add", "drain", "remove", "restart"):
                body = {"address": address}
                found = fleet.send("POST", f"/fleet/{action}", body, headers)
                assert found[0] == 401
        for action, fields, status, text in [
            ("add", {}, 400, "address: found none"),
            ("add", {"address": "nowhere"}, 400, "accepted: HOST:PORT"),
            ("add", {"address": "10.0.0.1:7000"}, 400, "secret"),
            ("add", {"like": address}, 400, "address: found none"),
            ("drain", {}, 400, "address"),
            ("drain", {"address": "127.0.0.1:1"}, 404, f"this server has {address}"),
            ("drain", {"address": address, "seconds": -1}, 400, "seconds: found"),
            ("restart", {"address": address}, 400, "was not started by this server"),
            ("remove", {"address": address, "other": 1}, 400, "other"),
        ]:
            found, body = change(fleet, action, **fields)
            assert (found, text in body["error"]["message"]) == (status, True), body
        assert [*rows(fleet)] == [address]
    with Fleet([address]) as fleet:
        assert fleet.send("GET", "/fleet")[0] == 404


def test_servers_with_one_file_have_the_same_engines(plain, engines, tmp_path):
    addresses = addresses_of(engines)
    path = tmp_path / "engines"
    path.write_text(f"# by hand\n{addresses[0]}\n", "utf-8")
    with ExitStack() as stack:

        def start():
            fleet = Fleet([], config=KEYS, file=ReplicaFile(path, 60.0))
            return stack.enter_context(fleet)

        one, two = start(), start()
        assert change(one, "add", address=addresses[1])[1]["scope"] == "file"
        for each in (one, two):
            until_ready(each, addresses)
        assert change(two, "drain", address=addresses[0], seconds=7)[0] == 200
        until_state(one, addresses[0], "draining")
        wanted = f"# by hand\n{addresses[0]} drain=7\n{addresses[1]}\n"
        assert path.read_text("utf-8") == wanted
        # One that starts later knows it too.
        three = start()
        until_ready(three, addresses[1:])
        until_state(three, addresses[0], "draining")
        for each in (one, two, three):
            assert answered(each) == answered(plain)
        # A line that is none changes nothing; the next change is followed.
        path.write_text("nothing\n", "utf-8")
        assert [*rows(three)] == addresses
        path.write_text(f"{addresses[0]}\n", "utf-8")
        for each in (one, two, three):
            until(lambda each=each: [*rows(each)] == addresses[:1])
            until_ready(each, addresses[:1])


def test_the_command_shows_and_changes_engines(engines, plain, capsys, monkeypatch):
    one, two = addresses_of(engines)
    monkeypatch.delenv("INL_ADMIN_KEY", raising=False)
    with Fleet([one], config=KEYS) as fleet:
        until_ready(fleet, [one])

        def inl(*words):
            options = "--url", fleet.url, "--admin-key", "operator"
            status = main(["fleet", *options, *words])
            output = capsys.readouterr()
            return status, output.err if status else output.out

        assert inl("add", two) == (
            0,
            f"{two}: is ready, on runner\n"
            "this server only, until it restarts; with --replica-file it is kept\n",
        )
        answered(fleet)
        table = inl("list")[1]
        assert f"{one}  ready  runner  0 of 8" in table
        assert f"{two}  ready  runner  0 of 8" in table
        shown = json.loads(inl("list", "--json")[1])
        assert [each["address"] for each in shown] == [one, two]
        assert f"{two}: gets no requests; 0 open ones finish" in inl("drain", two)[1]
        assert "is drained by an operator" in inl("list")[1]
        assert inl("remove", two, "--seconds", "1")[0] == 0
        until(lambda: [*rows(fleet)] == [one])
        for words, text in [
            (["stop", one], "found 'stop', accepted: list|add|drain|remove|roll"),
            (["drain"], "drain: found no ADDRESS"),
            (["drain", one], f"no engine but {one} is ready; add another one first"),
            (["drain", two], f"this server has {one}"),
            (["roll", two], f"roll: found no engine {two}"),
            (["add", "127.0.0.1:1", "--wait", "0"], "was not ready within 0 s"),
            (["list", "--url", "nowhere"], "accepts a URL"),
            (["list", "--url", plain.url], "has no engines to change"),
            (["list", "--admin-key", "other"], "admin key: found none"),
        ]:
            status, said = inl(*words)
            assert (status, text in said) == (2, True), said


def under_streams(fleet, count, work):
    """Return the tokens of ``count`` streams at a time, until ``work`` has ended."""
    bodies = [
        {**LONG, "seed": seed, "max_tokens": 60, "temperature": seed % 2}
        for seed in range(count)
    ]
    is_done, lines = threading.Event(), []

    def stream(body):
        while True:
            lines.append((body, ids_of(list(fleet.stream(TEXT, body)))))
            if is_done.is_set():
                return

    with ThreadPoolExecutor(count) as pool:
        streams = [pool.submit(stream, body) for body in bodies]
        try:
            until(lambda: fleet.parts)
            work()
        finally:
            is_done.set()
        for each in streams:
            each.result(WAIT)
    return lines


def check(plain, lines):
    wanted = {}
    for body, found in lines:
        seed = body["seed"]
        if seed not in wanted:
            wanted[seed] = answered(plain, body)
        assert found == wanted[seed]


def roll(fleet, said, *, address=None, in_place=False, seconds=None):
    server = FleetApi(fleet.url, "operator")
    Roll(server, seconds, WAIT, said).run(address, in_place=in_place)


@pytest.mark.full
def test_engines_at_addresses_are_rolled_under_load(plain):
    with ExitStack() as stack:
        engines = {}
        for _ in range(2):
            each = stack.enter_context(EngineProcess(**SLOW))
            engines[each.address] = each
        first = dict(engines)
        fleet = stack.enter_context(Fleet([*engines], config=KEYS))
        until_ready(fleet, engines)

        def said(line):
            address, _, what = line.partition(": ")
            if what.endswith("restart it now"):
                assert rows(fleet)[address]["open"] == 0
                engines[address].terminate()
                assert engines[address].process.wait(WAIT) == 0
                again = EngineProcess(address=address, **SLOW)
                engines[address] = stack.enter_context(again)

        check(plain, under_streams(fleet, 4, lambda: roll(fleet, said)))
        assert all(engines[each] is not first[each] for each in engines)
        assert not fleet.counts["lost"]
        assert not fleet.counts["failed"]
        assert {each["state"] for each in rows(fleet).values()} == {"ready"}


def local_engines(monkeypatch, count):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")
    return LocalEngines(EngineProcess.script.removesuffix(".py"), [SLOW] * count, 30.0)


@pytest.mark.full
@pytest.mark.parametrize("in_place", [False, True])
def test_engines_of_the_server_are_rolled_under_load(plain, monkeypatch, in_place):
    local = local_engines(monkeypatch, 2)
    with Fleet([], config=KEYS, local=local) as fleet:
        before = local.addresses
        until_ready(fleet, before)
        processes = {each["process"] for each in rows(fleet).values()}
        said = []

        def work():
            roll(fleet, said.append, in_place=in_place)

        check(plain, under_streams(fleet, 4, work))
        assert said[-1] == "2 of 2 engines were replaced"
        assert (local.addresses == before) == in_place
        assert [*rows(fleet)] == local.addresses
        assert not processes & {each["process"] for each in rows(fleet).values()}
        assert not fleet.counts["lost"]
        assert not fleet.counts["failed"]


@pytest.mark.full
def test_other_weights_end_a_roll_and_no_stream(plain, monkeypatch):
    local = local_engines(monkeypatch, 1)
    with Fleet([], config=KEYS, local=local) as fleet:
        before = local.addresses
        until_ready(fleet, before)
        engine = local._engines[before[0]]

        def work():
            for settings, reason in [
                ({**SLOW, "config": {"kv_dtype": "int8"}}, "is not used: has other"),
                ({**SLOW, "config": {"no_option": 1}}, "is gone"),
            ]:
                engine.settings = settings
                with pytest.raises(RequestError, match=reason):
                    roll(fleet, lambda _: None)
                until(lambda: [*rows(fleet)] == before)
            assert change(fleet, "add", like="127.0.0.1:1")[0] == 404

        check(plain, under_streams(fleet, 2, work))
        assert local.addresses == before
