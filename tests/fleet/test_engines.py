"""Engines that stop, vanish, drain, come back, or are not the fleet's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from fleets import LONG, SLOW, TEXT, EngineProcess, Fleet, Proxy, answered, disturbed
from http_servers import HashServer
from waiting import until

SECRET = bytes(range(32))


@pytest.fixture(scope="module")
def plain():
    with HashServer(max_batch=8) as server:
        yield server


@pytest.fixture
def engines():
    with EngineProcess(**SLOW) as one, EngineProcess(**SLOW) as two:
        yield [one, two]


def states(fleet):
    return [each["state"] for each in fleet.send("GET", "/load")[2]["replicas"]]


def until_states(fleet, *wanted):
    until(lambda: states(fleet) == list(wanted))


def test_a_stopped_engine_loses_its_requests_and_gets_others_once_it_answers(
    plain, engines
):
    stopped = []

    def stop():
        stopped.append(fleet.engine_of(engines))
        stopped[0].stop()

    with Fleet([each.address for each in engines]) as fleet:
        until_states(fleet, "ready", "ready")
        assert disturbed(fleet, stop) == answered(plain)
        assert fleet.counts["continued"] == fleet.counts["lost"] == 1
        assert "silent" in states(fleet)
        stopped[0].go_on()
        until_states(fleet, "ready", "ready")
        # What it has generated after all belongs to nobody.
        (other,) = set(engines) - set(stopped)
        other.kill()
        until(lambda: "absent" in states(fleet))
        assert answered(fleet) == answered(plain)


def test_an_engine_behind_a_broken_network_loses_its_requests(plain, engines, caplog):
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(each.address)) for each in engines]
        fleet = stack.enter_context(Fleet([each.address for each in proxies]))
        until_states(fleet, "ready", "ready")
        found = disturbed(fleet, lambda: fleet.engine_of(proxies).partition())
        assert found == answered(plain)
        assert fleet.counts["continued"] == fleet.counts["lost"] == 1
        assert sum("does not answer" in each.message for each in caplog.records) == 1
        text = fleet.send("GET", "/metrics")[2].decode()
        assert 'inl:fleet_engines{state="silent"} 1.0' in text
        for proxy in proxies:
            proxy.heal()
        until_states(fleet, "ready", "ready")


def test_an_engine_computes_recent_prompts_before_it_gets_requests(plain):
    prompts = [[number, *range(100)] for number in range(3)]
    bodies = [{**LONG, "prompt": prompt, "max_tokens": 2} for prompt in prompts]
    with EngineProcess(**SLOW) as one, Fleet([one.address]) as fleet:
        for body in bodies:
            answered(fleet, body)
        with EngineProcess(**SLOW) as two:
            fleet.add(two.address)
            until(lambda: states(fleet)[1:] == ["ready"])
            one.kill()
            until(lambda: states(fleet)[0] == "absent")
            for body in bodies:
                _, _, found = fleet.send("POST", TEXT, body)
                # It has never got them as requests.
                details = found["usage"]["prompt_tokens_details"]
                assert details["cached_tokens"] == 96
                assert found["choices"][0]["token_ids"] == answered(plain, body)
            assert not fleet.client.warming.open
            assert not fleet.client.warming.tasks


def test_clocks_may_differ_by_minutes(plain, caplog):
    with EngineProcess(clock=600, **SLOW) as one, EngineProcess(**SLOW) as two:
        engines = [one, two]
        with Fleet([each.address for each in engines]) as fleet:
            until_states(fleet, "ready", "ready")
            loads = fleet.send("GET", "/load")[2]["replicas"]
            assert loads[0]["clock_seconds"] == pytest.approx(600, abs=60)
            text = fleet.send("GET", "/metrics")[2].decode()
            (line,) = [
                each
                for each in text.splitlines()
                if each.startswith("inl:fleet_clock_seconds{") and one.address in each
            ]
            assert float(line.split()[1]) == pytest.approx(600, abs=60)
            assert f"engine {one.address}: its clock differs by +600 s" in caplog.text
            assert f"engine {two.address}: its clock differs" not in caplog.text
            # A time of one clock would have been over at the other one, or far away.
            body = {**LONG, "timeout_seconds": 300}
            two.kill()
            until_states(fleet, "ready", "absent")
            assert answered(fleet, body) == answered(plain)
            body = {**LONG, "timeout_seconds": 0.3, "max_tokens": 900}
            assert len(answered(fleet, body)) < 900


def test_the_only_engine_is_waited_for(plain):
    with EngineProcess(**SLOW) as engine, Fleet([engine.address]) as fleet:

        def stop():
            engine.stop()
            until_states(fleet, "silent")
            assert fleet.send("GET", "/ready")[0] == 503
            engine.go_on()

        assert disturbed(fleet, stop) == answered(plain)
        assert not fleet.counts["continued"]
        assert fleet.send("GET", "/ready")[0] == 200


def test_a_request_of_an_engine_that_is_started_again_goes_on_there(plain):
    with ExitStack() as stack:
        first = stack.enter_context(EngineProcess(**SLOW))
        fleet = stack.enter_context(Fleet([first.address]))

        def restart():
            first.kill()
            stack.enter_context(EngineProcess(address=first.address, **SLOW))

        assert disturbed(fleet, restart) == answered(plain)


def test_an_engine_that_stops_finishes_its_requests_and_gets_no_others(plain, engines):
    with Fleet([each.address for each in engines]) as fleet:
        until_states(fleet, "ready", "ready")
        leaving = []

        def drain():
            leaving.append(fleet.engine_of(engines))
            leaving[0].terminate()
            until(lambda: "draining" in states(fleet))
            assert answered(fleet) == answered(plain)

        assert disturbed(fleet, drain) == answered(plain)
        assert leaving[0].process.wait(300) == 0
        assert not fleet.counts["continued"]
        assert not fleet.counts["lost"]


def test_an_engine_that_stops_in_time_hands_its_requests_on(plain):
    options = {**SLOW, "server": {"drain_seconds": 0.2}}
    with ExitStack() as stack:
        one = stack.enter_context(EngineProcess(**options))
        two = stack.enter_context(EngineProcess(**SLOW))
        with Fleet([one.address]) as fleet:
            body = {**LONG, "max_tokens": 400}

            def drain():
                fleet.add(two.address)
                until_states(fleet, "ready", "ready")
                one.terminate()

            assert disturbed(fleet, drain, body) == answered(plain, body)
            assert fleet.counts["continued"] == 1


def test_engines_of_another_identity_or_secret_are_refused(caplog):
    other = {**SLOW, "config": {"kv_dtype": "int8"}, "digest": "other weights"}
    secret = {"INL_WORKER_SECRET": SECRET.hex()}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(EngineProcess(**SLOW)),
            stack.enter_context(EngineProcess(**other)),
            stack.enter_context(EngineProcess(secret, **SLOW)),
        ]
        fleet = stack.enter_context(Fleet([engines[0].address]))
        for each in engines[1:]:
            fleet.add(each.address)
        until_states(fleet, "ready", "refused", "refused")
        reasons = [each["reason"] for each in fleet.send("GET", "/load")[2]["replicas"]]
        assert "kv_dtype: int8, the fleet's: auto" in reasons[1]
        assert "model: other weights, the fleet's: " in reasons[1]
        assert "wrong secret" in reasons[2]
        assert fleet.counts["refused"] == 2
        assert b"inl:fleet_refused_total" in fleet.send("GET", "/metrics")[2]
        for _ in range(6):
            answered(fleet, {**LONG, "max_tokens": 2})
        assert states(fleet) == ["ready", "refused", "refused"]
    assert f"engine {engines[1].address} is not used" in caplog.text


def test_an_engine_and_a_front_end_know_each_other_by_a_secret_and_tls(monkeypatch):
    # Connections of the loopback interface are encrypted as those of other hosts.
    monkeypatch.setattr("inl.fleet.engine_link.is_encrypted", lambda _: True)
    secret = {"INL_WORKER_SECRET": SECRET.hex()}
    with EngineProcess(secret, address="0.0.0.0:0", **SLOW) as engine:
        address = engine.address.replace("0.0.0.0", "127.0.0.1")
        with Fleet([address], secret=SECRET) as fleet:
            answered(fleet, {**LONG, "max_tokens": 2})
            transport = fleet.client.engines[0]._link.transport
            assert transport.get_extra_info("cipher") is not None


def test_requests_wait_for_room_of_all_engines_and_the_rest_is_refused():
    options = {"max_batch": 2, "seconds": 0.005}
    with EngineProcess(**options) as one, EngineProcess(**options) as two:
        addresses = [one.address, two.address]
        with Fleet(addresses, config={"max_queue": 4}) as fleet:
            until_states(fleet, "ready", "ready")
            body = {**LONG, "max_tokens": 150}
            with ThreadPoolExecutor(16) as pool:
                asked = [pool.submit(fleet.send, "POST", TEXT, body) for _ in range(16)]
                found = [each.result() for each in asked]
            refused = [headers for status, headers, _ in found if status == 503]
            assert {status for status, _, _ in found} == {200, 503}
            assert len(refused) >= 1
            assert all(int(headers["retry-after"]) >= 1 for headers in refused)
            until(lambda: not fleet.client.admission.open)
            assert not any(load.open for load in fleet.client.router.loads.values())


def test_a_client_that_leaves_ends_its_request_at_the_engine(engines):
    with Fleet([engines[0].address]) as fleet:
        for index, _ in enumerate(fleet.stream(TEXT, LONG)):
            if index == 5:
                break
        until(lambda: not fleet.client.admission.open)
        assert not fleet.client.calls.parts
        assert not fleet.client.calls.groups


def test_other_requests_are_answered_by_an_engine_that_lives(engines):
    with Fleet([each.address for each in engines]) as fleet:
        until_states(fleet, "ready", "ready")
        engines[0].stop()
        for _ in range(4):
            status, _, found = fleet.send("POST", "/tokenize", {"prompt": "a river"})
            assert status == 200
            assert found["count"] == len(found["tokens"])
        assert fleet.send("GET", "/v1/models")[2]["data"][0]["id"] == "hash"
        assert fleet.send("GET", "/v1/models/none")[0] == 404
        assert fleet.send("GET", "/nothing")[0] == 404
        assert fleet.send("POST", TEXT, {"prompt": "a", "model": "b"})[0] == 404
